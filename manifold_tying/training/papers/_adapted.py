"""PIT's Table 6: checkpoints continued with each tying, then adapted by the same LoRA to the same task."""

from pathlib import Path
from typing import Any

from manifold_tying.training.config import Settings, read_shape
from manifold_tying.training.hf_model import OUT
from manifold_tying.training.papers._adaptation import EVALUATED, TRAINING, adaptation
from manifold_tying.training.papers._arms import Arm, train_arms
from manifold_tying.training.papers._pit import TRANSPOSE
from manifold_tying.training.papers._table import Table, share
from manifold_tying.training.progress import Started
from manifold_tying.training.sections import Interface

STEPS, RANK = 200, 8
LR, WIDTH = 0.012, 128  # of the updates, at that width
# GSM8K, trained on, and SVAMP, of GPT-256M after continued pretraining: exact match in per cent.
PRINTED = {"transpose": "16.9 / 12.4", "pit-frozen+init_transform=identity": "17.3 / 13.5"}


def adapted(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """Continued pretraining of one checkpoint with each tying, then LoRA; tables, Z and T stand still in the latter."""
    arms = [
        Arm(label=TRANSPOSE, spec="transpose"),
        Arm(label="PIT, Z frozen, T = I (the paper's)", spec="pit-frozen+init_transform=identity"),
        Arm(label="PIT, Z trained, by rotation", spec="pit-trainable+init_transform=rotation"),
    ]
    trained = train_arms(out / "continued", arms, settings, seeds, started)
    body = []
    for arm in arms:
        interface: Interface = "transpose" if arm.spec == "transpose" else "pit-frozen"
        frozen: dict[str, Any] = {} if interface == "transpose" else {"transform_lr": 0.0}
        rows = []
        for seed, run in trained.runs(arm).items():
            folder = run / OUT
            rows.append(
                adaptation(
                    folder,
                    out / "adapted" / run.name,
                    interface=interface,
                    steps=STEPS,
                    seed=seed,
                    lora_rank=RANK,
                    lr=LR * WIDTH / read_shape(folder).hidden_size,
                    device=settings.device,
                    **frozen,
                )
            )
        cells = [share([row[name] for row in rows]) for name in ("in_domain", "out_of_domain", "in_domain_before")]
        body.append([arm.label, *cells, PRINTED.get(arm.spec or "", "")])
    head = [
        "arm",
        "in domain (%)",
        "out of domain (%)",
        "in domain, before LoRA (%)",
        "paper: GSM8K / SVAMP (GPT-256M)",
    ]
    notes = [
        f"Exact match by greedy decoding on {EVALUATED} problems of each kind, after {STEPS} steps of LoRA with rank {RANK} on "
        f"{TRAINING:,} one-line word problems about sums and differences; out of domain is the same arithmetic in other words.",
        "The paper adapts to GSM8K and tests on SVAMP; it says neither its rank nor its rates, nor whether T is trained.",
        *trained.failures(),
    ]
    return [Table(title="PIT, Table 6: adaptation by LoRA", head=head, body=body, notes=notes)]
