"""One step's gradients over all processes, and what to do where they are not finite."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.optim import MergeSchedule, RiemannianAdam
from manifold_tying.training._checkpoint import checkpoints, load_checkpoint
from manifold_tying.training._config import Settings, TrainConfig
from manifold_tying.training._evaluation import Batch, autocast
from manifold_tying.training._hugging_face_model import Model
from manifold_tying.training._interface_health import health_warnings, is_lost
from manifold_tying.training._probes import Probes
from manifold_tying.training._processes import LossOf, Processes, without_sync
from manifold_tying.training._saving import stage_checkpoint
from manifold_tying.training._signals import Termination
from manifold_tying.training._writer import CheckpointWriter
from manifold_tying.training.data import Batches
from manifold_tying.tying import PIT


class Diverged(ValueError):
    """Loss or gradient became NaN or Inf, or the token interface lost W_out E = I, on all processes alike."""


@dataclass(frozen=True)
class Run:
    """What the steps of a run need. Its identity is that of its checkpoints: the configuration and what tells its text."""

    config: TrainConfig
    identity: dict[str, Any]
    arm: str
    processes: Processes
    model: Model
    loss_of: LossOf
    optimizer: RiemannianAdam
    schedule: MergeSchedule | None
    probes: Probes
    batches: Batches
    held_out: list[Batch]
    writer: CheckpointWriter

    def save(self, step: int) -> None:
        """Copy the state of this step, which is written while training goes on; raises what kept the one before from it."""
        self.writer.write(
            lambda: stage_checkpoint(
                step,
                self.model,
                self.optimizer,
                self.identity,
                schedule=self.schedule,
                probes=self.probes,
                processes=self.processes,
            )
        )

    def load(self, path: Path) -> int:
        return load_checkpoint(
            path,
            self.model,
            self.optimizer,
            self.identity,
            schedule=self.schedule,
            probes=self.probes,
            processes=self.processes,
        )


def gradients(run: Run, batch: Batch, device: torch.device, terminated: Termination) -> tuple[Tensor, bool]:
    """Gradients of one step's mean loss over its parts; returns that loss and whether any of several processes is to stop."""
    settings, processes = run.config.settings, run.processes
    for p in run.model.parameters():
        p.grad = None
    total = torch.zeros(2, device=device)  # the loss; whether to stop
    parts = list(zip(*(tensor.chunk(settings.accumulate) for tensor in batch), strict=True))
    for number, (ids, targets) in enumerate(parts, start=1):
        here, whole = processes.share(ids), len(ids)
        with without_sync(run.loss_of, number < len(parts)):
            with autocast(device):
                loss = run.loss_of(
                    here.to(device, non_blocking=True), processes.share(targets).to(device, non_blocking=True)
                )
            share = len(here) / whole
            total[0] += loss.detach() * share / settings.accumulate
            # DDP and FSDP2 average over the processes, whose shares may differ in size.
            penalized = loss * (share * processes.size) + _penalty(run.config, run.model)
            (penalized / settings.accumulate).backward()
    if processes.size == 1:
        return total[0], False
    total[1] = float(terminated.requested)
    processes.total(total)
    return total[0], bool(total[1] > 0)


def read(run: Run, loss: Tensor, norm: Tensor) -> tuple[float, float, bool]:
    """Loss and norm as numbers, and whether they and all gradients are finite, on which every process agrees.

    The one time in a step that the host waits for a GPU.
    """
    interface = [
        p.grad for p in run.model.interface.parameters() if p.grad is not None
    ]  # the memory is not in ``norm``
    others = [linalg.full_tensor(torch.nn.utils.get_total_norm(interface))] if interface else []
    values = torch.stack([loss, norm, *others]).tolist()
    return values[0], values[1], all(map(math.isfinite, values))


def why(run: Run, step: int, loss: float, skipped: int) -> str:
    """What is not finite, and what to do."""
    names = [
        name
        for name, p in run.model.named_parameters()
        if p.grad is not None and not linalg.to_local(p.grad).isfinite().all()
    ]
    bad = [name for found in run.processes.gather(names) for name in found]
    names = list(dict.fromkeys(bad))
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    what = f"gradient of parameter {listed} holds NaN or Inf" if names else "norm of the gradients overflows"
    text = f"step {step} of {run.arm}, seed {run.config.seed}: the loss is {loss:g}, the {what}"
    if skipped > 1:
        text += f", for the {skipped}th step in a row"
    saved = run.processes.first(lambda: [path.name for path in checkpoints(run.config.out)])
    kept = f"; {saved[-1]} is kept, and --resume goes on from it" if saved else ""
    return f"{text}{kept}. Lower the learning rate, or leave single steps out with --on-nan skip"


def check_interface(run: Run, step: int, measured: Mapping[str, Any], warned: set[str]) -> None:
    """Warn once of each quantity of the interface that is out of bounds, and raise Diverged where it is lost."""
    bridge = isinstance(run.model.interface, PIT) and run.model.interface.bridge is not None
    name = f"step {step} of {run.arm}, seed {run.config.seed}"
    if run.processes.any(is_lost(measured, bridge=bridge)):
        run.writer.wait()
        saved = run.processes.first(lambda: [path.name for path in checkpoints(run.config.out)])
        raise Diverged(
            f"{name}: the token interface is lost. ΔTI = ‖W_out E - I‖ is {measured['delta_ti']:.2g} and cond(T) is "
            f"{measured['cond_transform']:.2g}; from ΔTI = 1 on W_out need not undo E at all. {_advice(run.config.settings)} "
            "and choose another --out" + (f"; {saved[-1]} is kept" if saved else "")
        )
    for quantity, text in health_warnings(measured, bridge=bridge).items():
        if quantity not in warned and run.processes.writes:
            warnings.warn(f"{name}: {text}", RuntimeWarning, stacklevel=2)
        warned.add(quantity)


def _advice(settings: Settings) -> str:
    if settings.transform_lr is None:
        return f"Lower the learning rate of the free table (--lr, here {settings.lr:g})"
    return f"Lower the learning rate of T (--transform-lr, here {settings.transform_lr:g})"


def _penalty(config: TrainConfig, model: Model) -> Tensor | float:
    log_det, diagonal = config.settings.log_det_penalty, config.settings.diagonal_penalty
    if (log_det or diagonal) and isinstance(model.interface, PIT):
        return model.interface.penalty(log_det=log_det, diagonal_scale=diagonal)
    return 0.0
