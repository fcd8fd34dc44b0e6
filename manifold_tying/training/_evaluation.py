"""What is measured at an evaluation: the validation loss and the token interface."""

from collections.abc import Callable

import torch
from torch import Tensor

from manifold_tying import diagnostics
from manifold_tying.training._hugging_face_model import Model
from manifold_tying.training._processes import LossOf, Processes, gathered
from manifold_tying.tying import PIT

Batch = tuple[Tensor, Tensor]


@torch.no_grad()
def evaluate(
    loss_of: LossOf,
    batches: list[Batch],
    device: torch.device,
    processes: Processes,
    interrupted: Callable[[], bool] = lambda: False,
) -> float | None:
    """Mean cross-entropy over the batches, nats per token; each process takes every ``processes.size``-th of them.

    None if ``interrupted()`` was true on one of the processes before a batch.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, len(batches), processes.size):
        if processes.any(interrupted()):
            return None
        place = start + processes.rank
        ids, targets = batches[min(place, len(batches) - 1)]  # FSDP2 needs every process in every forward
        with autocast(device):
            loss = loss_of(ids.to(device), targets.to(device)).double() * targets.numel()
        total += loss if place < len(batches) else 0.0
    return processes.total(total).item() / sum(targets.numel() for _, targets in batches)


@torch.no_grad()
def describe_interface(model: Model) -> dict[str, float | None]:
    """defect of the memory, ΔTI of the tables, condition of the transform; None where there is no such thing."""
    interface = model.interface
    with gathered(interface):
        return {
            "defect": diagnostics.defect(interface.memory).item() if isinstance(interface, PIT) else None,
            "delta_ti": diagnostics.delta_ti(*interface.materialize()),
            "cond_transform": _condition(interface.cholesky_factor) if isinstance(interface, PIT) else None,
        }


def _condition(factor: Tensor) -> float:
    """cond(T); NaN of a model that has diverged, whose row is to be written."""
    return diagnostics.condition_from_factor(factor) if factor.isfinite().all() else float("nan")


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on CUDA, nothing elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
