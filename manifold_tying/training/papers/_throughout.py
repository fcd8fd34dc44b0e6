"""What the token interface of each arm looked like at every evaluation of its runs."""

from collections.abc import Iterator

from manifold_tying.training.numbers import DASH, significant
from manifold_tying.training.papers._arms import Arm, Trained
from manifold_tying.training.papers._table import Table
from manifold_tying.training.records import lines_of
from manifold_tying.training.rundir import METRICS

QUANTITIES = ("delta_ti", "defect", "cond_transform")


def interface_table(title: str, trained: Trained) -> Table:
    """The largest ΔTI, defect and condition number of each PIT arm, over all evaluations of all seeds."""
    body = []
    for arm in trained.arms:
        if (arm.spec or "").startswith("pit"):
            largest = [max(_measured(trained, arm, name), default=None) for name in QUANTITIES]
            body.append([arm.label, *(DASH if value is None else significant(value, 2) for value in largest)])
    head = ["arm", "largest ‖W_out E − I‖", "largest ‖ZᵀZ − I‖ / √d", "largest cond(T)"]
    return Table(
        title=title, head=head, body=body, notes=["Over all seeds and all evaluations, the last one included."]
    )


def _measured(trained: Trained, arm: Arm, quantity: str) -> Iterator[float]:
    for run in trained.runs(arm).values():
        for line in lines_of(run / METRICS, required=("step",), optional=(quantity,)):
            if line.get(quantity) is not None:
                yield line[quantity]
