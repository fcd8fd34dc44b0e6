"""Evaluation: validation loss, metrics of the token interface, and their limits."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from manifold_tying import diagnostics
from manifold_tying.poet import cached_weights
from manifold_tying.training.config import TrainConfig
from manifold_tying.training.hf_model import Model
from manifold_tying.training.processes import LossOf, Processes, gathered
from manifold_tying.training.saving import CheckpointWriter
from manifold_tying.tying import PIT

Batch = tuple[Tensor, Tensor]
LARGEST_CONDITION = 1e3  # up to here W_out E = I holds to 1e-4 in float32
LARGEST_DELTA_TI = 1e-2
LOST_DELTA_TI = 1.0  # only ‖W_out E - I‖₂ < 1 guarantees that W_out E is invertible


class Diverged(ValueError):
    """A loss or gradient is NaN or Inf, or the token interface lost W_out E = I. Raised on all ranks."""


def evaluate(
    model: Model, batches: list[Batch], device: torch.device, processes: Processes, interrupted: Callable[[], bool]
) -> dict[str, Any] | None:
    """Validation loss and interface metrics; None if ``interrupted()`` is true on any rank."""
    with torch.no_grad(), autocast(device), cached_weights(model):
        loss = validation_loss(model.loss, batches, device, processes, interrupted)
    return None if loss is None else {"val_loss": loss, **interface_metrics(model)}


@torch.no_grad()
def validation_loss(
    loss_fn: LossOf, batches: list[Batch], device: torch.device, processes: Processes,
    interrupted: Callable[[], bool] = lambda: False,
) -> float | None:  # fmt: skip
    """Mean cross-entropy in nats per token; None if ``interrupted()`` is true on any rank before a batch."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, len(batches), processes.size):
        if processes.any(interrupted()):
            return None
        index = start + processes.rank
        ids, targets = batches[min(index, len(batches) - 1)]  # FSDP2 needs every rank in every forward
        with autocast(device):
            loss = loss_fn(ids.to(device), targets.to(device)).double() * targets.numel()
        total += loss if index < len(batches) else 0.0
    return processes.all_reduce(total).item() / sum(targets.numel() for _, targets in batches)


@torch.no_grad()
def interface_metrics(model: Model) -> dict[str, float | None]:
    """Defect of the memory, ΔTI of the tables and cond(T); None if the interface lacks the measured part."""
    interface = model.interface
    with gathered(interface):
        delta_ti = diagnostics.delta_ti(*interface.materialize())
        if not isinstance(interface, PIT):
            return {"defect": None, "delta_ti": delta_ti, "cond_transform": None}
        defect, factor = diagnostics.defect(interface.memory).item(), interface.cholesky_factor
        # NaN, not an error, so that a diverged model still gets a line in the log.
        condition = diagnostics.condition_from_factor(factor) if factor.isfinite().all() else math.nan
        return {"defect": defect, "delta_ti": delta_ti, "cond_transform": condition}


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on CUDA, nothing elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def health_warnings(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Warnings by metric; none for plain tables or a healthy PIT interface."""
    condition, delta_ti = metrics.get("cond_transform"), metrics.get("delta_ti")
    if condition is None:
        return {}
    found, advice = {}, "Train with a lower --transform-lr (with a free table, --table-lr)"
    if condition > LARGEST_CONDITION:
        text = f"cond(T) is {condition:.2g}, above {LARGEST_CONDITION:g}: W_out E = I loses digits. {advice}"
        found["cond_transform"] = text
    if delta_ti is not None and delta_ti > LARGEST_DELTA_TI:
        what = f"ΔTI = ‖W_out E - I‖ is {delta_ti:.2g}, above {LARGEST_DELTA_TI:g}: W_out no longer inverts E"
        found["delta_ti"] = f"{what} to working accuracy. {advice}"
    return found


class InterfaceCheck:
    """Warns once about each interface metric outside its limits, and stops a run that has lost W_out E = I."""

    def __init__(self, config: TrainConfig, arm: str, processes: Processes, writer: CheckpointWriter) -> None:
        self._config, self._arm, self._processes, self._writer = config, arm, processes, writer
        self._warned: set[str] = set()

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Check the metrics of an evaluation. Raises Diverged on all ranks if W_out E = I is lost."""
        where = f"step {step} of {self._arm}, seed {self._config.seed}"
        pit = metrics["cond_transform"] is not None
        if self._processes.any(pit and math.isfinite(metrics["val_loss"]) and metrics["delta_ti"] >= LOST_DELTA_TI):
            settings, kept = self._config.settings, self._writer.kept()
            rate = next(rate for rate in ("transform_lr", "table_lr", "lr") if getattr(settings, rate) is not None)
            what, flag = "T" if rate == "transform_lr" else "the free table", rate.replace("_", "-")
            raise Diverged(
                f"{where}: the token interface is lost. ΔTI = ‖W_out E - I‖ is {metrics['delta_ti']:.2g} and cond(T) is "
                f"{metrics['cond_transform']:.2g}; from ΔTI = 1 on, W_out may not invert E at all. Lower the learning rate "
                f"of {what} (--{flag}, here {getattr(settings, rate):g}) and choose another --out"
                + (f"; {kept[-1]} is kept" if kept else "")
            )
        for metric, text in health_warnings(metrics).items():
            if metric not in self._warned and self._processes.is_main:
                warnings.warn(f"{where}: {text}", RuntimeWarning, stacklevel=2)
            self._warned.add(metric)
