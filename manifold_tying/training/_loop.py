"""The training loop."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.recipe import rate_factor
from manifold_tying.training._build import build_merges, build_model, build_optimizer, clipped_parameters
from manifold_tying.training._config import TrainConfig
from manifold_tying.training._evaluation import describe_interface, evaluate
from manifold_tying.training._folder import open_folder
from manifold_tying.training._identity import CORPUS
from manifold_tying.training._lock import locked
from manifold_tying.training._machine import check_device, reset_peak_memory
from manifold_tying.training._probes import Probes
from manifold_tying.training._processes import Processes
from manifold_tying.training._recipe import resolve
from manifold_tying.training._record import Record
from manifold_tying.training._row import write_row
from manifold_tying.training._run_data import load_data_together, run_data
from manifold_tying.training._signals import Termination, termination
from manifold_tying.training._step import Diverged, Run, check_interface, gradients, read, why
from manifold_tying.training._writer import CheckpointWriter

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
        ValueError: the folder holds another run or is in use, the corpus is too small or not the one that the run began
            with, or a gradient or the validation loss at the end is NaN or Inf.
        OSError: something cannot be written; what was written before is whole.
        SystemExit: SIGTERM or Ctrl-C; the step in flight was finished and saved. Status 143 or 130. An evaluation that was
            cut short is made up for by the resumed run. A second Ctrl-C is KeyboardInterrupt at once.
    """
    config = resolve(config)
    settings = config.settings
    device = check_device(settings.device)
    processes = Processes.of(settings)
    arm = arm or config.interface + (f"+body={settings.body}" if settings.poet else "")
    data = run_data(load_data_together(config, processes), settings, config.seed)
    reset_peak_memory(device)
    model = build_model(config)
    loss_of = processes.place(model, settings.compile)
    optimizer = build_optimizer(model, settings)
    schedule = build_merges(model, optimizer, settings)
    probes = Probes(model, schedule)
    with ExitStack() as stack:
        processes.on_first(lambda: stack.enter_context(locked(config.out)))
        writer = stack.enter_context(
            CheckpointWriter(config.out, processes, settings.timeout, settings.keep_checkpoints)
        )
        identity = {**config.as_json(), CORPUS: data.identity}
        run = Run(
            config, identity, arm, processes, model, loss_of, optimizer, schedule, probes, data.batches, data.held_out, writer
        )  # fmt: skip
        start = open_folder(run)
        record: Record | None = None
        try:
            record = processes.together(lambda: Record(config.out, start) if processes.writes else None)
            with termination(announced=processes.writes) as terminated:
                _steps(run, record, start, observer, terminated)
                row = processes.first(lambda: write_row(run, record))
        finally:
            if record is not None:
                record.close()
    if processes.any(terminated.requested):  # too late for this run, but not for the next one
        if processes.writes:
            print(f"{terminated.name}: the run in {config.out} is complete")
        raise SystemExit(terminated.status)
    if row["val_loss"] is None or not math.isfinite(row["val_loss"]):
        raise Diverged(
            f"the validation loss of {arm}, seed {config.seed}, is not finite after its {settings.steps} steps. Lower the "
            "learning rate, and choose another --out"
        )
    return row


def _steps(run: Run, record: Record | None, start: int, observer: Observer | None, terminated: Termination) -> None:
    """The steps that are missing; there is an evaluation after the last one."""
    settings = run.config.settings
    # Remembered in the group, so that a resumed run finds the peak and not the rate of the step it stopped at.
    peaks = [float(group.setdefault("peak_lr", group["lr"])) for group in run.optimizer.param_groups]
    clipped = clipped_parameters(run.model)
    warned: set[str] = set()
    skipped = run.processes.first(lambda: record.skipped if record else 0)
    if start == 0:
        looked_at = run.probes.measure()["weights"]
        if record:
            record.write_probes({"step": 0, "tokens": 0, "weights": looked_at})
    elif run.processes.first(lambda: _evaluates(run, start) and "val_loss" not in (record.last if record else {})):
        measured = _evaluated(run, terminated)
        if measured is None:
            _stop(run, record, start, terminated, evaluated=False)
        if record:
            record.complete(measured)
        check_interface(run, start, measured, warned)
    for step in range(start, settings.steps):
        done = step + 1
        metrics, seconds, stops = _step(run, step, peaks, clipped, skipped, terminated)
        skipped = skipped + 1 if metrics.get("skipped") else 0
        measured = {}
        if _evaluates(run, done):
            metrics |= _probed(run, record, metrics)
            measured = _evaluated(run, terminated)
        if record:
            metrics |= measured or {}
            record.write(metrics, seconds)
            if observer is not None:
                observer(metrics | {"tokens_per_second": settings.tokens_per_step / seconds})
        if measured:
            check_interface(run, done, measured, warned)
        stops = stops or measured is None or (run.processes.size == 1 and terminated.requested)
        ends, every = done == settings.steps, settings.checkpoint_every
        if ends or stops or (every and done % every == 0):
            if record:
                record.flush()
            run.save(done)
        if ends or stops:
            run.writer.wait()
        if stops and not (ends and measured is not None):
            _stop(run, record, done, terminated, evaluated=measured is not None)


def _evaluates(run: Run, done: int) -> bool:
    """Whether an evaluation follows this many steps."""
    settings = run.config.settings
    return done % (settings.eval_every or settings.steps) == 0 or done == settings.steps


def _step(
    run: Run, step: int, peaks: list[float], clipped: list[Tensor], skipped: int, terminated: Termination
) -> tuple[dict[str, Any], float, bool]:
    """One step, the ``skipped``-th after the last that was taken: its metrics, its seconds, whether a process is to stop."""
    settings, optimizer, schedule = run.config.settings, run.optimizer, run.schedule
    began = time.perf_counter()
    lengths = step, settings.steps, settings.warmup_steps or 0
    factor = rate_factor(*lengths)
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * rate_factor(*lengths, group.get("slows_after"))
    mean, stops = gradients(run, run.batches.batch(step), torch.device(settings.device), terminated)
    norm = linalg.full_tensor(torch.nn.utils.get_total_norm([p.grad for p in clipped if p.grad is not None]))
    loss, length, taken = read(run, mean, norm)
    if taken:
        most = schedule.clip(settings.clip) if schedule else settings.clip
        torch.nn.utils.clip_grads_with_norm_(clipped, most, norm)
        optimizer.step()
    elif settings.on_nan == "stop" or skipped + 1 == MOST_SKIPPED:
        run.writer.wait()  # the message names the newest checkpoint
        raise Diverged(why(run, step + 1, loss, skipped + 1))
    metrics: dict[str, Any] = {
        "step": step + 1,
        "tokens": (step + 1) * settings.tokens_per_step,
        "loss": loss,
        "lr": settings.lr * factor if settings.lr else 0.0,
        "grad_norm": length,
        **({} if taken else {"skipped": True}),
    }
    seconds = time.perf_counter() - began
    if schedule is not None:
        run.probes.step()
        began = time.perf_counter()  # merging is a part of training, looking at it is not
        schedule.step()
        seconds += time.perf_counter() - began
    return metrics, seconds, stops


def _probed(run: Run, record: Record | None, metrics: dict[str, Any]) -> dict[str, Any]:
    """The rotations at an evaluation; the numbers of single weights go to their own file."""
    probed = run.probes.measure()
    weights = probed.pop("weights")
    if record:
        record.write_probes({"step": metrics["step"], "tokens": metrics["tokens"], "weights": weights})
    return probed


def _evaluated(run: Run, terminated: Termination) -> dict[str, Any] | None:
    """Validation loss and token interface; None if a signal cut the evaluation short."""
    device = torch.device(run.config.settings.device)
    loss = evaluate(run.model.loss, run.held_out, device, run.processes, lambda: terminated.requested)
    return None if loss is None else {"val_loss": loss, **describe_interface(run.model)}


def _stop(run: Run, record: Record | None, done: int, terminated: Termination, *, evaluated: bool) -> NoReturn:
    """End a saved run that a signal stopped before it was complete."""
    if record:
        missing = "" if evaluated else ", whose evaluation the resumed run makes up for,"
        print(
            f"{terminated.name}: saved step {done} of {run.config.settings.steps}{missing} in {run.config.out}. "
            "Resume with --resume, or with the same ablate command"
        )
    raise SystemExit(terminated.status)
