"""The course of one run, from the files that it wrote step by step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifold_tying.training.report._checked import check_number, lines_of, object_of
from manifold_tying.training.report._experiment import Run

COURSE = (  # what is drawn out of metrics.jsonl
    "loss", "val_loss", "defect", "delta_ti", "cond_transform", "orthogonality_error", "lr"
)  # fmt: skip


def course_of(folder: Path, arm: str, seed: int) -> Run:
    """metrics.jsonl, timing.jsonl and, where there is one, probes.jsonl of a run's folder."""
    metrics = list(lines_of(folder / "metrics.jsonl", required=("step", "tokens"), optional=COURSE))
    timing = lines_of(folder / "timing.jsonl", required=("step", "seconds"))
    seconds = {line["step"]: line["seconds"] for line in timing}
    probes = _probes(folder / "probes.jsonl") if (folder / "probes.jsonl").exists() else []
    return Run(arm=arm, seed=seed, metrics=metrics, seconds=seconds, probes=probes)


def _probes(path: Path) -> list[Mapping[str, Any]]:
    """The looks at the weights, each weight's numbers in one flat object: svd_entropy, R.vector, updates.min, ..."""
    probes: list[Mapping[str, Any]] = []
    for count, line in enumerate(lines_of(path, required=("step", "tokens")), start=1):
        where = f"{path}, line {count}"
        weights = object_of(line.get("weights"), f"{where}, 'weights'")
        flat = {name: _flat(numbers, f"{where}, {name}") for name, numbers in weights.items()}
        probes.append({**line, "weights": flat})
    return probes


def _flat(numbers: object, where: str) -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in object_of(numbers, where).items():
        if isinstance(value, list) and value:
            named: dict[str, Any] = {"min": value[0], "median": value[len(value) // 2], "max": value[-1]}
        elif isinstance(value, Mapping):
            named = dict(value)
        else:
            check_number(value, key, where)
            flat[key] = value
            continue
        for name, one in named.items():
            check_number(one, f"{key}.{name}", where)
            flat[f"{key}.{name}"] = one
    return flat
