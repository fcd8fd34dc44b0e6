"""How a run ended: one row of a summary."""

import json
from typing import Any

from manifold_tying.training._files import write_whole
from manifold_tying.training._folder import RESULT
from manifold_tying.training._hugging_face_model import OUT, HuggingFaceModel
from manifold_tying.training._identity import CORPUS
from manifold_tying.training._machine import check_device, peak_memory
from manifold_tying.training._record import Record, finite
from manifold_tying.training._step import Run


def write_row(run: Run, record: Record | None) -> dict[str, Any]:
    """Write ``OUT/result.json``, and the trained checkpoint of a run that goes on from one; returns the row."""
    assert record is not None, "the process that writes has a record"
    settings, last = run.config.settings, record.last
    row = {
        "arm": run.arm,
        "seed": run.config.seed,
        "val_loss": last["val_loss"],
        "train_loss": _mean(record.losses[-max(1, settings.steps // 10) :]),
        "tokens": settings.steps * settings.tokens_per_step,
        "seconds": record.seconds,
        "tokens_per_second": settings.steps * settings.tokens_per_step / record.seconds,
        "peak_memory_bytes": peak_memory(check_device(settings.device)),
        **{name: last[name] for name in ("defect", "delta_ti", "cond_transform", "orthogonality_error")},
        "trainable_parameters": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
        **{name: run.identity[CORPUS][name] for name in ("evaluated_tokens", "held_out_sha256")},
    }
    if isinstance(run.model, HuggingFaceModel) and settings.init_from is not None:
        run.model.write(run.config.out / OUT, settings.init_from)
    write_whole(run.config.out / RESULT, json.dumps(finite(row), indent=1).encode())
    return row


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
