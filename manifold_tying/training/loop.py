"""A training run from top to bottom: set up or resume, the steps, one step, and what ends a run."""

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.optim import MergeSchedule, RiemannianAdam
from manifold_tying.recipe import rate_factor
from manifold_tying.training._build import build_merges, build_model, build_optimizer, clipped_parameters
from manifold_tying.training._checkpoint import load_checkpoint
from manifold_tying.training._config import Settings, TrainConfig
from manifold_tying.training._files import write_whole
from manifold_tying.training._folder import RESULT, open_folder
from manifold_tying.training._hugging_face_model import OUT, HuggingFaceModel, Model
from manifold_tying.training._identity import CORPUS
from manifold_tying.training._lock import locked
from manifold_tying.training._machine import check_device, peak_memory, reset_peak_memory
from manifold_tying.training._probes import Probes
from manifold_tying.training._processes import LossOf, Processes, without_sync
from manifold_tying.training._recipe import resolve
from manifold_tying.training._record import Record, finite
from manifold_tying.training._run_data import load_data_together, run_data
from manifold_tying.training._saving import stage_checkpoint
from manifold_tying.training._signals import Termination, termination
from manifold_tying.training._writer import CheckpointWriter
from manifold_tying.training.evaluate import Batch, Diverged, InterfaceCheck, autocast, evaluate
from manifold_tying.tying import PIT

MAX_SKIPPED = 10  # steps in a row, with on_nan="skip"
Observer = Callable[[dict[str, Any]], None]


@dataclass
class TrainState:
    """What a checkpoint holds, and how far the run has come."""

    model: Model
    optimizer: RiemannianAdam
    merges: MergeSchedule | None
    probes: Probes
    identity: dict[str, Any]  # the settings and a fingerprint of the text
    step: int = 0
    skipped: int = 0  # steps in a row, up to now
    clipped: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.clipped = clipped_parameters(self.model)

    def save(self, writer: CheckpointWriter, processes: Processes) -> None:
        """Copy the state; the writer's thread writes the copy. Raises the error of the checkpoint before."""
        saved = self.step, self.model, self.optimizer, self.identity
        writer.write(lambda: stage_checkpoint(*saved, schedule=self.merges, probes=self.probes, processes=processes))

    def load(self, path: Path, processes: Processes) -> int:
        """Load a checkpoint and return its step."""
        loaded = self.model, self.optimizer, self.identity
        return load_checkpoint(path, *loaded, schedule=self.merges, probes=self.probes, processes=processes)


def train(config: TrainConfig, *, arm: str | None = None, observer: Observer | None = None) -> dict[str, Any]:
    """Run it to its end and return the summary row, which is also written to ``OUT/result.json``.

    Where torch.distributed has been initialized, all ranks of the default group call this and share the work as
    ``settings.parallel`` says; rank 0 writes.

    Args:
        config: the run.
        arm: its name in the row; where None the interface's, with the body where that is not AdamW's.
        observer: called by rank 0 after every step with that step's metrics and "tokens_per_second".

    Raises:
        ValueError: the folder holds another run or is in use, the corpus is too small or not the one that the run began
            with, or a gradient or the validation loss at the end is NaN or Inf.
        OSError: something cannot be written; what was written before is intact.
        SystemExit: SIGTERM or Ctrl-C; the step in flight was finished and saved. Status 143 or 130. The resumed run makes
            up for an evaluation that was cut short. A second Ctrl-C is KeyboardInterrupt at once.
    """
    config = resolve(config)
    settings, device = config.settings, check_device(config.settings.device)
    processes = Processes.of(settings)
    arm = arm or config.interface + (f"+body={settings.body}" if settings.poet else "")
    data = run_data(load_data_together(config, processes), settings, config.seed)
    reset_peak_memory(device)
    model = build_model(config)
    loss_fn = processes.place(model, settings.compile)
    optimizer = build_optimizer(model, settings)
    merges = build_merges(model, optimizer, settings)
    state = TrainState(model, optimizer, merges, Probes(model, merges), {**config.as_json(), CORPUS: data.identity})
    with ExitStack() as stack:
        processes.on_first(lambda: stack.enter_context(locked(config.out)))
        writer = stack.enter_context(
            CheckpointWriter(config.out, processes, settings.timeout, settings.keep_checkpoints)
        )
        state.step = open_folder(config, arm, state.identity, processes, lambda path: state.load(path, processes))
        # Saved with its group: a resumed run finds the peak, not the rate of the step it stopped at.
        for group in optimizer.param_groups:
            group.setdefault("peak_lr", group["lr"])
        record = processes.together(lambda: Record(config.out, state.step) if processes.writes else None)
        if record:
            stack.callback(record.close)
        stop = stack.enter_context(termination(announced=processes.writes))
        state.skipped = processes.first(lambda: record.skipped if record else 0)
        measure = partial(evaluate, model, data.held_out, device, processes, lambda: stop.requested)
        check_interface = InterfaceCheck(model, config, arm, processes, writer)

        if state.step == 0:
            probed = state.probes.measure()
            if record:
                record.write_probes({"step": 0, "tokens": 0, "weights": probed["weights"]})
        elif _evaluates(state.step, settings) and processes.first(lambda: record and "val_loss" not in record.last):
            measured = measure()  # a signal cut this evaluation short
            if measured is None:
                _exit_early(stop, state.step, config, processes, evaluated=False)
            if record:
                record.complete(measured)
            check_interface(state.step, measured)

        while state.step < settings.steps:
            began = time.perf_counter()
            metrics, stopping = train_step(state, data.batches.batch(state.step), loss_fn, config, processes, stop)
            if state.skipped == MAX_SKIPPED or (state.skipped and settings.on_nan == "stop"):
                raise Diverged(_nan_message(state, metrics["loss"], config, arm, processes, writer))
            seconds = time.perf_counter() - began
            if merges:
                state.probes.step()
                began = time.perf_counter()  # merging is a part of training, probing is not
                merges.step()
                seconds += time.perf_counter() - began

            measured = {}
            if _evaluates(state.step, settings):
                probed = state.probes.measure()
                weights = probed.pop("weights")
                if record:
                    record.write_probes({"step": state.step, "tokens": metrics["tokens"], "weights": weights})
                measured = measure()
                metrics |= probed | (measured or {})
            if record:
                record.write(metrics, seconds)
                if observer is not None:
                    observer(metrics | {"tokens_per_second": settings.tokens_per_step / seconds})
            if measured:
                check_interface(state.step, measured)

            stopping = stopping or measured is None or (processes.size == 1 and stop.requested)
            ends, every = state.step == settings.steps, settings.checkpoint_every
            if ends or stopping or (every and state.step % every == 0):
                if record:
                    record.flush()
                state.save(writer, processes)
            if stopping and not (ends and measured):
                writer.wait()
                _exit_early(stop, state.step, config, processes, evaluated=measured is not None)

        writer.wait()
        row = processes.first(lambda: _write_row(config, arm, state, record))
    if processes.any(stop.requested):  # too late for this run, but an ablation starts no other one
        if processes.writes:
            print(f"{stop.name}: the run in {config.out} is complete")
        raise SystemExit(stop.status)
    if row["val_loss"] is None or not math.isfinite(row["val_loss"]):
        raise Diverged(
            f"the validation loss of {arm}, seed {config.seed}, is not finite after its {settings.steps} steps. Lower the "
            "learning rate, and choose another --out"
        )
    return row


def train_step(
    state: TrainState, batch: Batch, loss_fn: LossOf, config: TrainConfig, processes: Processes, stop: Termination
) -> tuple[dict[str, Any], bool]:
    """Update the model unless a gradient is NaN or Inf. Returns the metrics, and whether one of several ranks is to stop."""
    settings, device = config.settings, torch.device(config.settings.device)
    progress = state.step, settings.steps, settings.warmup_steps or 0
    for group in state.optimizer.param_groups:
        group["lr"] = group["peak_lr"] * rate_factor(*progress, group.get("slows_after"))

    state.model.zero_grad()
    total = torch.zeros(2, device=device)  # mean loss; number of ranks that are to stop
    micro_batches = list(zip(*(tensor.chunk(settings.accumulate) for tensor in batch), strict=True))
    for number, (ids, targets) in enumerate(micro_batches, start=1):
        local = [processes.share(tensor).to(device, non_blocking=True) for tensor in (ids, targets)]
        share = len(local[0]) / len(ids)
        with without_sync(loss_fn, number < len(micro_batches)):
            with autocast(device):
                loss = loss_fn(*local)
            total[0] += loss.detach() * share / settings.accumulate
            # DDP and FSDP2 average over the ranks, whose shares may differ in size.
            penalized = loss * (share * processes.size) + _penalty(settings, state.model)
            (penalized / settings.accumulate).backward()
    if processes.size > 1:
        total[1] = float(stop.requested)
        processes.total(total)

    norm = _grad_norm(state.clipped)
    # Of the interface, too: the memory is not clipped, but its gradient has to be finite.
    interface = [p for p in state.model.interface.parameters() if p.grad is not None]
    others = [_grad_norm(interface)] if interface else []
    # The one host sync of a step. All ranks read the same values and agree on what follows.
    values = torch.stack([*total, norm, *others]).tolist()
    mean_loss, stopping, grad_norm, *_ = values
    taken = all(map(math.isfinite, values))
    if taken:
        clip = state.merges.clip(settings.clip) if state.merges else settings.clip
        torch.nn.utils.clip_grads_with_norm_(state.clipped, clip, norm)
        state.optimizer.step()
    state.step += 1
    state.skipped = 0 if taken else state.skipped + 1
    metrics = {
        "step": state.step,
        "tokens": state.step * settings.tokens_per_step,
        "loss": mean_loss,
        "lr": settings.lr * rate_factor(*progress) if settings.lr else 0.0,
        "grad_norm": grad_norm,
        **({} if taken else {"skipped": True}),
    }
    return metrics, stopping > 0


def _grad_norm(parameters: list[Tensor]) -> Tensor:
    return linalg.full_tensor(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def _penalty(settings: Settings, model: Model) -> Tensor | float:
    log_det, diagonal = settings.log_det_penalty, settings.diagonal_penalty
    if (log_det or diagonal) and isinstance(model.interface, PIT):
        return model.interface.penalty(log_det=log_det, diagonal_scale=diagonal)
    return 0.0


def _evaluates(step: int, settings: Settings) -> bool:
    """Whether an evaluation follows this many steps; one follows the last."""
    return step % (settings.eval_every or settings.steps) == 0 or step == settings.steps


def _nan_message(
    state: TrainState, loss: float, config: TrainConfig, arm: str, processes: Processes, writer: CheckpointWriter
) -> str:
    """Which gradients are not finite, and what to do."""
    kept = writer.kept()
    bad = [
        name
        for name, p in state.model.named_parameters()
        if p.grad is not None and not linalg.to_local(p.grad).isfinite().all()
    ]
    names = list(dict.fromkeys(name for found in processes.gather(bad) for name in found))
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    what = f"gradient of parameter {listed} holds NaN or Inf" if names else "norm of the gradients overflows"
    text = f"step {state.step} of {arm}, seed {config.seed}: the loss is {loss:g}, the {what}"
    if state.skipped > 1:
        text += f", for the {state.skipped}th step in a row"
    if kept:
        text += f"; {kept[-1]} is kept, and --resume goes on from it"
    return f"{text}. Lower the learning rate, or leave single steps out with --on-nan skip"


def _exit_early(
    stop: Termination, step: int, config: TrainConfig, processes: Processes, *, evaluated: bool
) -> NoReturn:
    """End a saved run that a signal stopped before it was complete."""
    if processes.writes:
        missing = "" if evaluated else ", whose evaluation the resumed run makes up for,"
        print(
            f"{stop.name}: saved step {step} of {config.settings.steps}{missing} in {config.out}. "
            "Resume with --resume, or with the same ablate command"
        )
    raise SystemExit(stop.status)


def _write_row(config: TrainConfig, arm: str, state: TrainState, record: Record | None) -> dict[str, Any]:
    """Write ``OUT/result.json``, and the model of a run with ``init_from``; returns the row."""
    assert record is not None, "rank 0 has a record"
    settings, last = config.settings, record.last
    losses = record.losses[-max(1, settings.steps // 10) :]
    row = {
        "arm": arm,
        "seed": config.seed,
        "val_loss": last["val_loss"],
        "train_loss": sum(losses) / len(losses) if losses else math.nan,
        "tokens": settings.steps * settings.tokens_per_step,
        "seconds": record.seconds,
        "tokens_per_second": settings.steps * settings.tokens_per_step / record.seconds,
        "peak_memory_bytes": peak_memory(check_device(settings.device)),
        **{name: last[name] for name in ("defect", "delta_ti", "cond_transform", "orthogonality_error")},
        "trainable_parameters": sum(p.numel() for p in state.model.parameters() if p.requires_grad),
        **{name: state.identity[CORPUS][name] for name in ("evaluated_tokens", "held_out_sha256")},
    }
    if isinstance(state.model, HuggingFaceModel) and settings.init_from is not None:
        state.model.write(config.out / OUT, settings.init_from)
    write_whole(config.out / RESULT, json.dumps(finite(row), indent=1).encode())
    return row
