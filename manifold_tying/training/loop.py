"""A training run: data, setup or resume, steps and early exits."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from manifold_tying import distributed
from manifold_tying.optim import MergeSchedule, RiemannianAdam
from manifold_tying.recipe import rate_factor
from manifold_tying.training.build import build_merges, build_model, build_optimizer, clipped_parameters
from manifold_tying.training.checkpoint import load_checkpoint
from manifold_tying.training.config import CORPUS, Settings, TrainConfig
from manifold_tying.training.evaluate import Batch, Diverged, InterfaceCheck, autocast, evaluate
from manifold_tying.training.files import locked, write_atomic
from manifold_tying.training.hf_model import Model
from manifold_tying.training.machine import check_device, reset_peak_memory
from manifold_tying.training.probes import Probes
from manifold_tying.training.processes import LossOf, Processes, without_sync
from manifold_tying.training.recipes import resolve
from manifold_tying.training.run_data import load_data, run_data
from manifold_tying.training.rundir import TOKENIZER, check_out, open_folder, write_row
from manifold_tying.training.saving import CheckpointWriter, stage_checkpoint
from manifold_tying.training.signals import Termination, termination

MAX_SKIPPED = 10  # steps in a row, with on_nan="skip"
Observer = Callable[[dict[str, Any]], None]


@dataclass
class TrainState:
    """The state that a checkpoint saves."""

    model: Model
    optimizer: RiemannianAdam
    merges: MergeSchedule | None
    probes: Probes
    clipped: list[Tensor]  # parameters
    step: int = 0
    skipped: int = 0  # in a row


def train(config: TrainConfig, *, arm: str | None = None, observer: Observer | None = None) -> dict[str, Any]:
    """Train to the end and return the summary row, also written to ``OUT/result.json``.

    With torch.distributed initialized, every rank of the default group calls this. ``settings.parallel`` sets how they
    share the work; rank 0 writes the files.

    Args:
        config: the run.
        arm: the run's name in the row; None is the interface's name, plus the body's with POET.
        observer: called on rank 0 after every step with its metrics and "tokens_per_second".

    Raises:
        ValueError: the folder holds another run or is in use; the corpus is too small or has changed; or a gradient or the
            final validation loss is NaN or Inf.
        OSError: a file cannot be written. Everything written before is intact.
        SystemExit: SIGTERM (status 143) or Ctrl-C (130), once the current step is finished and saved. The resumed run
            repeats an interrupted evaluation. A second Ctrl-C raises KeyboardInterrupt at once.
    """
    config = resolve(config)
    settings, device = config.settings, check_device(config.settings.device)
    processes = Processes.from_settings(settings)
    arm = arm or config.interface + ("" if settings.body == "adamw" else f"+body={settings.body}")
    processes.on_main(lambda: check_out(config))
    tokens = load_data(config, processes)
    data = run_data(tokens, settings, config.seed)
    reset_peak_memory(device)
    model = build_model(config)
    loss_fn = processes.wrap(model, settings.compile)
    optimizer = build_optimizer(model, settings)
    merges = build_merges(model, optimizer, settings)
    state = TrainState(model, optimizer, merges, Probes(model, merges), clipped_parameters(model))
    identity = {**config.as_json(), CORPUS: data.identity}
    extras: dict[str, Any] = {"schedule": merges, "probes": state.probes, "processes": processes}
    with ExitStack() as stack:
        processes.on_main(lambda: stack.enter_context(locked(config.out)))
        writer = stack.enter_context(
            CheckpointWriter(config.out, processes, settings.timeout, settings.keep_checkpoints)
        )
        load = partial(load_checkpoint, model=model, optimizer=optimizer, config=identity, **extras)
        state.step, record = open_folder(config, arm, identity, processes, load)
        if record:
            write_atomic(config.out / TOKENIZER, (tokens.directory / TOKENIZER).read_bytes())
            stack.callback(record.close)
        state.skipped = processes.from_main(lambda: record.skipped if record else 0)
        # Checkpoints save the groups, so this survives a resume; "lr" changes at every step.
        for group in optimizer.param_groups:
            group.setdefault("peak_lr", group["lr"])
        stop = stack.enter_context(termination(announced=processes.is_main))
        measure = partial(evaluate, model, data.held_out, device, processes, lambda: stop.requested)
        check_interface = InterfaceCheck(config, arm, processes, writer)

        if state.step == 0:
            probed = state.probes.measure()
            if record:
                record.write_probes(0, 0, probed["weights"])
        elif _evaluates(state.step, settings) and processes.from_main(lambda: record and "val_loss" not in record.last):
            measured = measure()  # a signal interrupted it
            if measured is None:
                _exit_early(stop, state.step, config, processes, measured=False)
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
                began = time.perf_counter()  # the time includes merging but not probing
                merges.step()
                seconds += time.perf_counter() - began

            measured = {}
            if _evaluates(state.step, settings):
                probed = state.probes.measure()
                weights = probed.pop("weights")
                if record:
                    record.write_probes(state.step, metrics["tokens"], weights)
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
                writer.write(partial(stage_checkpoint, state.step, model, optimizer, identity, **extras))
            if stopping and not (ends and measured):
                writer.wait()
                _exit_early(stop, state.step, config, processes, measured=measured is not None)

        writer.wait()
        row = processes.from_main(lambda: write_row(config, arm, identity, model, record))
    if processes.any(stop.requested):  # the run is complete, but an ablation must stop here
        if processes.is_main:
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
    """Update the model unless a gradient is NaN or Inf. Returns the metrics and, with several ranks, whether to stop."""
    settings, device = config.settings, torch.device(config.settings.device)
    progress = state.step, settings.steps, settings.warmup_steps or 0
    for group in state.optimizer.param_groups:
        group["lr"] = group["peak_lr"] * rate_factor(*progress, group.get("slows_after"))

    state.model.zero_grad()
    total = torch.zeros(2, device=device)  # mean loss; number of ranks that received a signal
    micro_batches = list(zip(*(tensor.chunk(settings.accumulate) for tensor in batch), strict=True))
    for number, (ids, targets) in enumerate(micro_batches, start=1):
        own = (tensor.tensor_split(processes.size)[processes.rank] for tensor in (ids, targets))
        local = [tensor.to(device, non_blocking=True) for tensor in own]
        share = len(local[0]) / len(ids)
        with without_sync(loss_fn, number < len(micro_batches)):
            with autocast(device):
                loss = loss_fn(*local)
            total[0] += loss.detach() * share / settings.accumulate
            # DDP and FSDP2 average over the ranks, whose numbers of sequences may differ.
            (loss * (share * processes.size / settings.accumulate)).backward()
    if processes.size > 1:
        total[1] = float(stop.requested)
        processes.all_reduce(total)

    norm = _grad_norm(state.clipped)
    # The memory is not clipped, but its gradient must also be finite.
    interface = [p for p in state.model.interface.parameters() if p.grad is not None]
    others = [_grad_norm(interface)] if interface else []
    # A step's only host sync. All ranks read the same values, so they take the same branch.
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
    return distributed.full_tensor(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def _evaluates(step: int, settings: Settings) -> bool:
    return step % (settings.eval_every or settings.steps) == 0 or step == settings.steps


def _nan_message(
    state: TrainState, loss: float, config: TrainConfig, arm: str, processes: Processes, writer: CheckpointWriter
) -> str:
    kept = writer.kept()
    grads = {name: distributed.to_local(p.grad) for name, p in state.model.named_parameters() if p.grad is not None}
    bad = [name for name, grad in grads.items() if not grad.isfinite().all()]
    names = list(dict.fromkeys(name for found in processes.all_gather(bad) for name in found))
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    what = f"gradient of parameter {listed} holds NaN or Inf" if names else "norm of the gradients overflows"
    text = f"step {state.step} of {arm}, seed {config.seed}: the loss is {loss:g}, the {what}"
    if state.skipped > 1:
        text += f", for the {state.skipped}th step in a row"
    if kept:
        text += f"; --resume continues from {kept[-1]}"
    skip = ", or skip single steps with --on-nan skip" if config.settings.on_nan == "stop" else ""
    return f"{text}. Lower the learning rate{skip}"


def _exit_early(stop: Termination, step: int, config: TrainConfig, processes: Processes, *, measured: bool) -> NoReturn:
    """Exit with the signal's status; the run is saved."""
    if processes.is_main:
        missing = "" if measured else ", whose evaluation the resumed run repeats,"
        print(
            f"{stop.name}: saved step {step} of {config.settings.steps}{missing} in {config.out}. "
            "The same command resumes it; train needs --resume"
        )
    raise SystemExit(stop.status)
