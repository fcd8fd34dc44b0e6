"""The training loop."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manifold_tying import linalg
from manifold_tying.training._build import build_merges, build_model, build_optimizer, clipped_parameters, rate_factor
from manifold_tying.training._checkpoint import (
    checkpoints,
    find_checkpoint,
    set_newer_aside,
)
from manifold_tying.training._command import called_as, train_command
from manifold_tying.training._config import TrainConfig, check_device
from manifold_tying.training._evaluation import describe_interface, evaluate
from manifold_tying.training._files import write_whole
from manifold_tying.training._hugging_face_model import OUT, HuggingFaceModel
from manifold_tying.training._machine import machine, peak_memory, reset_peak_memory
from manifold_tying.training._probes import Probes
from manifold_tying.training._processes import Processes
from manifold_tying.training._recipe import resolve
from manifold_tying.training._record import METRICS, Record, finite
from manifold_tying.training._signals import EXIT_STATUS, Termination, termination
from manifold_tying.training._step import Diverged, Run, gradients, usable, why
from manifold_tying.training._writer import CheckpointWriter
from manifold_tying.training.data import Batches, TokenData, open_tokens, prepare, validation_batches

CONFIG, RESULT = "config.json", "result.json"
ORIGIN = "run.json"  # apart from the configuration: a resumed run may be called otherwise, and elsewhere
MOST_SKIPPED = 10  # steps in a row, with on_nan="skip"
Observer = Callable[[dict[str, Any]], None]


def train(config: TrainConfig, *, arm: str | None = None, observer: Observer | None = None) -> dict[str, Any]:
    """Run it to its end and return the summary row, which is also written to ``OUT/result.json``.

    Where torch.distributed has been initialized, all processes of the default group call this and share the work as
    ``settings.parallel`` says; the first of them writes.

    Args:
        config: the run.
        arm: its name in the row; where None the interface's, with the body where that is not AdamW's.
        observer: called by the process that writes after every step with that step's metrics and "tokens_per_second".

    Raises:
        ValueError: the folder holds another run or a damaged one, the corpus is too small, or a gradient is NaN or Inf.
        OSError: something cannot be written; what was written before is whole.
        SystemExit: SIGTERM arrived; the step in flight was finished and saved. Status 143.
    """
    config = resolve(config)
    settings = config.settings
    device = check_device(settings.device)
    processes = Processes.of(settings)
    arm = arm or config.interface + (f"+body={settings.body}" if settings.poet else "")
    data = load_data_together(config, processes)
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
    loss_of = processes.place(model, settings.compile)
    optimizer = build_optimizer(model, settings)
    schedule = build_merges(model, optimizer, settings)
    probes = Probes(model, schedule)
    with CheckpointWriter(config.out, processes, settings.timeout, settings.keep_checkpoints) as writer:
        run = Run(config, arm, processes, model, loss_of, optimizer, schedule, probes, batches, held_out, writer)
        start = _open_folder(run)
        record: Record | None = None
        try:
            record = processes.together(lambda: Record(config.out, start) if processes.writes else None)
            with termination() as terminated:
                _steps(run, record, start, observer, terminated)
            return processes.first(lambda: _write_row(run, record))
        finally:
            if record is not None:
                record.close()


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


def load_data_together(
    config: TrainConfig, processes: Processes, progress: Callable[[str], None] | None = None
) -> TokenData:
    """:func:`load_data`, on one process before the others, so that it alone makes what is not in the cache."""
    if processes.size == 1:
        return load_data(config, progress)
    processes.first(lambda: discard(load_data(config, progress)))
    return processes.together(lambda: load_data(config))


def discard(value: object) -> None:
    """What is not to be sent to the others."""


def _open_folder(run: Run) -> int:
    """Make the run's folder or find the checkpoint to go on from; returns the step that was reached."""
    config, processes = run.config, run.processes
    device = torch.device(config.settings.device)
    path = processes.first(lambda: _checkpoint_of(config))
    start = 0
    if path is not None:
        start = run.load(path)
        if config.resume_from is not None:
            processes.first(lambda: set_newer_aside(path))

    def write() -> None:
        try:
            config.out.mkdir(parents=True, exist_ok=True)
            write_whole(config.out / CONFIG, json.dumps(config.as_json(), indent=1).encode())
            origin = {"command": called_as("train") or train_command(config), "machine": machine(device)}
            write_whole(config.out / ORIGIN, json.dumps(origin, indent=1).encode())
        except OSError as error:
            raise ValueError(
                f"cannot write to {config.out}: {error.strerror}; choose a folder that is writable"
            ) from error

    processes.first(write)
    return start


def _checkpoint_of(config: TrainConfig) -> Path | None:
    """Where to go on from; ValueError where the folder holds a run that nobody asked to go on with."""
    if config.resume_from is not None:
        return find_checkpoint(config.out, config.resume_from)
    saved = checkpoints(config.out)
    if not config.resume and (saved or (config.out / METRICS).exists()):
        raise ValueError(f"{config.out} holds a run already; go on with it (--resume) or choose another folder")
    return saved[-1] if saved else None


def _steps(run: Run, record: Record | None, start: int, observer: Observer | None, terminated: Termination) -> None:
    """The steps that are missing; there is an evaluation after the last one."""
    settings, processes, optimizer, schedule = run.config.settings, run.processes, run.optimizer, run.schedule
    device = torch.device(settings.device)
    # Remembered in the group, so that a resumed run finds the peak and not the rate of the step it stopped at.
    peaks = [float(group.setdefault("peak_lr", group["lr"])) for group in optimizer.param_groups]
    clipped = clipped_parameters(run.model)
    skipped = processes.first(lambda: record.skipped if record else 0)
    if start == 0:
        looked_at = run.probes.measure()["weights"]
        if record:
            record.write_probes({"step": 0, "tokens": 0, "weights": looked_at})
    for step in range(start, settings.steps):
        began = time.perf_counter()
        factor = rate_factor(step, settings)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        loss, stops = gradients(run, run.batches.batch(step), device, terminated)
        norm = linalg.whole(torch.nn.utils.get_total_norm([p.grad for p in clipped if p.grad is not None]))
        done = step + 1
        taken = usable(run, loss, norm)
        if taken:
            skipped = 0
            most = schedule.clip(settings.clip) if schedule else settings.clip
            torch.nn.utils.clip_grads_with_norm_(clipped, most, norm)
            optimizer.step()
        else:
            skipped += 1
            if settings.on_nan == "stop" or skipped == MOST_SKIPPED:
                run.writer.wait()  # the message names the newest checkpoint
                raise Diverged(why(run, done, loss, skipped))
        metrics: dict[str, Any] = {
            "step": done,
            "tokens": done * settings.tokens_per_step,
            "loss": loss.item(),
            "lr": settings.lr * factor if settings.lr else 0.0,
            "grad_norm": norm.item(),
            **({} if taken else {"skipped": True}),
        }
        seconds = time.perf_counter() - began
        if schedule is not None:
            run.probes.step()
            began = time.perf_counter()  # merging is a part of training, looking at it is not
            schedule.step()
            seconds += time.perf_counter() - began
        if done % (settings.eval_every or settings.steps) == 0 or done == settings.steps:
            probed = run.probes.measure()
            weights = probed.pop("weights")
            if record:
                record.write_probes({"step": done, "tokens": metrics["tokens"], "weights": weights})
            metrics["val_loss"] = evaluate(run.model.loss, run.held_out, device, processes)
            metrics |= {**describe_interface(run.model), **probed}
        if record:
            record.write(metrics, seconds)
            if observer is not None:
                observer(metrics | {"tokens_per_second": settings.tokens_per_step / seconds})
        ends, stops = done == settings.steps, stops or (processes.size == 1 and terminated.requested)
        if ends or stops or (settings.checkpoint_every and done % settings.checkpoint_every == 0):
            if record:
                record.flush()
            run.save(done)
        if ends or stops:
            run.writer.wait()
        if stops and not ends:
            if record:
                print(f"SIGTERM: saved step {done} of {settings.steps} in {run.config.out}; go on with --resume")
            raise SystemExit(EXIT_STATUS)


def _write_row(run: Run, record: Record | None) -> dict[str, Any]:
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
    }
    if isinstance(run.model, HuggingFaceModel) and settings.init_from is not None:
        run.model.write(run.config.out / OUT, settings.init_from)
    write_whole(run.config.out / RESULT, json.dumps(finite(row), indent=1).encode())
    return row


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
