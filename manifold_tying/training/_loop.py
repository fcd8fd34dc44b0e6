"""The training loop."""

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manifold_tying import diagnostics
from manifold_tying.optim import MergeSchedule
from manifold_tying.training._build import build_merges, build_model, build_optimizer, clipped_parameters, rate_factor
from manifold_tying.training._checkpoint import checkpoints, load_checkpoint, save_checkpoint
from manifold_tying.training._config import TrainConfig, check_device
from manifold_tying.training._files import write_whole
from manifold_tying.training._hugging_face_model import OUT, HuggingFaceModel, Model
from manifold_tying.training._machine import peak_memory, reset_peak_memory
from manifold_tying.training._probes import Probes
from manifold_tying.training._recipe import resolve
from manifold_tying.training._record import METRICS, Record, finite
from manifold_tying.training.data import Batches, TokenData, open_tokens, prepare, validation_batches
from manifold_tying.tying import PIT

CONFIG, RESULT = "config.json", "result.json"
Batch = tuple[Tensor, Tensor]
Observer = Callable[[dict[str, Any]], None]


def train(config: TrainConfig, *, arm: str | None = None, observer: Observer | None = None) -> dict[str, Any]:
    """Run it to its end and return the summary row, which is also written to ``OUT/result.json``.

    Args:
        config: the run.
        arm: its name in the row; where None the interface's, with the body where that is not AdamW's.
        observer: called after every step with that step's metrics and "tokens_per_second".

    Raises:
        ValueError: the folder holds another run or a damaged one, the corpus is too small, or a gradient is NaN or Inf.
    """
    config = resolve(config)
    settings = config.settings
    device = check_device(settings.device)
    data = load_data(config)
    batches = Batches(
        data.train, batch_size=settings.batch_size, sequence_length=settings.sequence_length, seed=config.seed
    )
    held_out = validation_batches(
        data.val,
        batch_size=max(settings.batch_size // settings.accumulate, 1),
        sequence_length=settings.sequence_length,
        max_tokens=max(settings.val_tokens, settings.sequence_length),
    )
    reset_peak_memory(device)
    model = build_model(config)
    optimizer = build_optimizer(model, settings)
    schedule = build_merges(model, optimizer, settings)
    probes = Probes(model, schedule)
    start = _open_folder(config, model, optimizer, schedule, probes)
    record = Record(config.out, start)
    try:
        _steps(config, model, optimizer, schedule, probes, batches, held_out, record, start, observer)
        last = record.last
        row = {
            "arm": arm or config.interface + (f"+body={settings.body}" if settings.poet else ""),
            "seed": config.seed,
            "val_loss": last["val_loss"],
            "train_loss": _mean(record.losses[-max(1, settings.steps // 10) :]),
            "tokens": settings.steps * settings.tokens_per_step,
            "seconds": record.seconds,
            "tokens_per_second": settings.steps * settings.tokens_per_step / record.seconds,
            "peak_memory_bytes": peak_memory(device),
            **{name: last[name] for name in ("defect", "delta_ti", "cond_transform", "orthogonality_error")},
            "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        }
    finally:
        record.close()
    if isinstance(model, HuggingFaceModel) and settings.init_from is not None:
        model.write(config.out / OUT, settings.init_from)
    write_whole(config.out / RESULT, json.dumps(finite(row), indent=1).encode())
    return row


def load_data(config: TrainConfig, progress: Callable[[str], None] | None = None) -> TokenData:
    """The tokens of a run, from the cache or made now."""
    settings = config.settings
    return open_tokens(
        prepare(
            settings.data,
            vocab_size=settings.vocab_size,
            tokens_needed=settings.steps * settings.tokens_per_step + settings.val_tokens,
            tokenizer=settings.tokenizer,
            progress=progress,
        )
    )


@torch.no_grad()
def evaluate(model: Model, batches: list[Batch], device: torch.device) -> float:
    """Mean cross-entropy over the batches, nats per token."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for ids, targets in batches:
        with _autocast(device):
            total += model.loss(ids.to(device), targets.to(device)).double() * targets.numel()
    return total.item() / sum(targets.numel() for _, targets in batches)


@torch.no_grad()
def describe_interface(model: Model) -> dict[str, float | None]:
    """defect of the memory, ΔTI of the tables, condition of the transform; None where there is no such thing."""
    interface = model.interface
    return {
        "defect": diagnostics.defect(interface.memory).item() if isinstance(interface, PIT) else None,
        "delta_ti": diagnostics.delta_ti(*interface.materialize()),
        "cond_transform": diagnostics.condition(interface.transform) if isinstance(interface, PIT) else None,
    }


def _open_folder(
    config: TrainConfig,
    model: Model,
    optimizer: torch.optim.Optimizer,
    schedule: MergeSchedule | None,
    probes: Probes,
) -> int:
    """Make the run's folder or find the checkpoint to go on from; returns the step that was reached."""
    out, identity = config.out, config.as_json()
    saved = checkpoints(out)
    if not config.resume and (saved or (out / METRICS).exists()):
        raise ValueError(f"{out} holds a run already; go on with it (--resume) or choose another folder")
    start = 0
    if saved:
        start = load_checkpoint(saved[-1], model, optimizer, identity, schedule=schedule, probes=probes)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / CONFIG, json.dumps(identity, indent=1).encode())
    except OSError as error:
        raise ValueError(f"cannot write to {out}: {error.strerror}; choose a folder that is writable") from error
    return start


def _steps(
    config: TrainConfig,
    model: Model,
    optimizer: torch.optim.Optimizer,
    schedule: MergeSchedule | None,
    probes: Probes,
    batches: Batches,
    held_out: list[Batch],
    record: Record,
    start: int,
    observer: Observer | None,
) -> None:
    """The steps that are missing; there is an evaluation after the last one."""
    settings, device = config.settings, torch.device(config.settings.device)
    identity = config.as_json()
    loss_of = torch.compile(model.loss) if settings.compile else model.loss
    # Remembered in the group, so that a resumed run finds the peak and not the rate of the step it stopped at.
    peaks = [float(group.setdefault("peak_lr", group["lr"])) for group in optimizer.param_groups]
    clipped = clipped_parameters(model)
    if start == 0:
        record.write_probes({"step": 0, "tokens": 0, "weights": probes.measure()["weights"]})
    for step in range(start, settings.steps):
        began = time.perf_counter()
        factor = rate_factor(step, settings)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        loss = _gradients(config, model, loss_of, batches.batch(step), device)
        norm = torch.nn.utils.get_total_norm([p.grad for p in clipped if p.grad is not None])
        if norm.isfinite():  # otherwise the optimizer names the parameter
            most = schedule.clip(settings.clip) if schedule else settings.clip
            torch.nn.utils.clip_grads_with_norm_(clipped, most, norm)
        optimizer.step()
        done = step + 1
        metrics: dict[str, Any] = {
            "step": done,
            "tokens": done * settings.tokens_per_step,
            "loss": loss.item(),
            "lr": settings.lr * factor if settings.lr else 0.0,
            "grad_norm": norm.item(),
        }
        seconds = time.perf_counter() - began
        if schedule is not None:
            probes.step()
            began = time.perf_counter()  # merging is a part of training, looking at it is not
            schedule.step()
            seconds += time.perf_counter() - began
        if done % (settings.eval_every or settings.steps) == 0 or done == settings.steps:
            probed = probes.measure()
            record.write_probes({"step": done, "tokens": metrics["tokens"], "weights": probed.pop("weights")})
            metrics |= {"val_loss": evaluate(model, held_out, device), **describe_interface(model), **probed}
        record.write(metrics, seconds)
        if observer is not None:
            observer(metrics | {"tokens_per_second": settings.tokens_per_step / seconds})
        if done == settings.steps or (settings.checkpoint_every and done % settings.checkpoint_every == 0):
            record.flush()
            save_checkpoint(config.out, done, model, optimizer, identity, schedule=schedule, probes=probes)


def _gradients(
    config: TrainConfig, model: Model, loss_of: Callable[..., Tensor], batch: Batch, device: torch.device
) -> Tensor:
    """Gradients of one step's mean loss, over its parts; returns that loss, detached."""
    settings = config.settings
    for p in model.parameters():
        p.grad = None
    total = torch.zeros((), device=device)
    parts = zip(*(tensor.chunk(settings.accumulate) for tensor in batch), strict=True)
    for ids, targets in parts:
        with _autocast(device):
            loss = loss_of(ids.to(device, non_blocking=True), targets.to(device, non_blocking=True))
        total += loss.detach() / settings.accumulate
        penalized = loss + _penalty(config, model)
        (penalized / settings.accumulate).backward()
    return total


def _penalty(config: TrainConfig, model: Model) -> Tensor | float:
    log_det, diagonal = config.settings.log_det_penalty, config.settings.diagonal_penalty
    if (log_det or diagonal) and isinstance(model.interface, PIT):
        return model.interface.penalty(log_det=log_det, diagonal_scale=diagonal)
    return 0.0


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
