"""Which runs let go of W_out E = I, in sentences."""

from manifold_tying.training._interface_health import health_warnings
from manifold_tying.training.report._experiment import Experiment

QUANTITIES = ("cond_transform", "delta_ti")


def health(experiment: Experiment) -> list[str]:
    """A sentence for each quantity of a run's PIT interface that was out of bounds at one of its evaluations."""
    sentences = []
    for run in experiment.runs:
        worst = {
            name: max((abs(line[name]) for line in run.metrics if line.get(name) is not None), default=None)
            for name in QUANTITIES
        }
        bridge = bool({**experiment.settings, **experiment.arms.get(run.arm, {})}.get("bridge"))
        found = health_warnings(worst, bridge=bridge).values()
        sentences += [f"{run.arm}, seed {run.seed}, at its worst evaluation: {text}." for text in found]
    return sentences
