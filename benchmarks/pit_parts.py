"""Which part of PIT's result is due to W_out E = I: loosen the tie of the same model, part by part.

    python -m benchmarks.pit_parts --variants memory --tokens 184320 --out benchmarks/results/pit-parts-cpu.json
    python -m benchmarks.pit_parts --variants table --out benchmarks/results/pit-parts-cpu.json

All variants use PIT's recipe from scratch (docs/learning-rates.md) with the same batches and seeds, without further tuning. In
``memory``, E = Z T⁻¹ and W_out = T Zᵀ, with separate Z or T on the two sides, Z off the manifold, or a scalar T. In ``table``,
W_out = Wᵀ and E = W M. Runs that are already in the file are skipped.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
import tyro
from torch import Tensor, nn
from torch.nn.utils import parametrize

import manifold_tying as mt
from benchmarks._command import commit
from manifold_tying.models import Llama
from manifold_tying.optim import param_groups
from manifold_tying.recipe import ENTRY_STEP, SLOWS_AFTER, rate_factor
from manifold_tying.training import Settings, TrainConfig, resolve
from manifold_tying.training.build import transform_rates
from manifold_tying.training.evaluate import validation_loss
from manifold_tying.training.machine import machine
from manifold_tying.training.processes import Processes
from manifold_tying.training.run_data import load_data, run_data
from manifold_tying.tying import LossOptions

MEMORY, FACTOR = "parametrizations.memory.original", "parametrizations.cholesky_factor.original"


def _stored(pit: mt.PIT, name: str) -> Any:
    """The parametrization list of ``memory`` or ``cholesky_factor``."""
    lists: Any = pit.parametrizations
    return lists[name]


class Halves(mt.TokenInterface):
    """E of one interface and W_out of another, which may share parameters."""

    def __init__(self, lookup: mt.PIT, head: mt.PIT) -> None:
        super().__init__(lookup.vocab_size, lookup.hidden_size)
        self.lookup, self.head = lookup, head

    def embed(self, ids: Tensor) -> Tensor:
        return self.lookup.embed(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)

    def loss(self, hidden: Tensor, targets: Tensor, **options: Unpack[LossOptions]) -> Tensor:
        return self.head.loss(hidden, targets, **options)

    def materialize(self) -> tuple[Tensor, Tensor]:
        return self.lookup.materialize()[0], self.head.materialize()[1]


class ScalarTransform(Halves):
    """T = exp(s) I: one learned number sharpens the logits."""

    def __init__(self, pit: mt.PIT) -> None:
        _stored(pit, "cholesky_factor").original.requires_grad_(False)
        super().__init__(pit, pit)
        self.log_scale = nn.Parameter(torch.zeros(1))

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * (-self.log_scale).exp()

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden * self.log_scale.exp())

    def loss(self, hidden: Tensor, targets: Tensor, **options: Unpack[LossOptions]) -> Tensor:
        return super().loss(hidden * self.log_scale.exp(), targets, **options)


class TableTimes(mt.TransposeTying):
    """W_out = Wᵀ and E = W M: M = (WᵀW)^-power, or a free matrix that starts as the identity."""

    def __init__(self, vocab_size: int, hidden_size: int, power: float | None) -> None:
        super().__init__(vocab_size, hidden_size, std=mt.tying.tied_std(hidden_size))
        self.power = power
        self.matrix = nn.Parameter(torch.eye(hidden_size), requires_grad=power is None)

    def _times(self, rows: Tensor) -> Tensor:
        if self.power is None:
            return rows @ self.matrix
        if self.power == 0:
            return rows
        squares, axes = torch.linalg.eigh(self.weight.mT @ self.weight)
        return (rows @ axes * squares**-self.power) @ axes.mT

    def embed(self, ids: Tensor) -> Tensor:
        return self._times(super().embed(ids))

    def materialize(self) -> tuple[Tensor, Tensor]:
        return self._times(self.weight).detach(), self.weight.detach().mT


def _pit(vocab_size: int, hidden_size: int) -> mt.PIT:
    return mt.PIT(vocab_size, hidden_size, memory="trainable", diagonal="exp")


def _halves(shared: Sequence[str]) -> Callable[[int, int], mt.TokenInterface]:
    """Two equally initialized sides that share the named tensors, of ``memory`` and ``cholesky_factor``."""

    def build(vocab_size: int, hidden_size: int) -> mt.TokenInterface:
        lookup = _pit(vocab_size, hidden_size)
        head = copy.deepcopy(lookup)
        for name in shared:
            _stored(head, name).original = _stored(lookup, name).original
        return Halves(lookup, head)

    return build


def _free(pit: mt.PIT) -> mt.PIT:
    """Turn Z into an ordinary parameter, initially orthonormal."""
    parametrize.remove_parametrizations(pit, "memory", leave_parametrized=True)
    point = pit.memory.detach().clone()
    del pit.memory
    pit.register_parameter("memory", nn.Parameter(point))
    return pit


OF_A_MEMORY: dict[str, tuple[str, Callable[[int, int], mt.TokenInterface]]] = {
    "pit": ("PIT: W_out E = I", _pit),
    "two-transforms": ("a free T' on the head's side", _halves(["memory"])),
    "two-memories": ("a free Z' on the head's side", _halves(["cholesky_factor"])),
    "untied": ("free T' and Z' on the head's side", _halves([])),
    "free-memory": ("Z off the manifold", lambda V, d: _free(_pit(V, d))),
    "scalar": ("T a number", lambda V, d: ScalarTransform(_pit(V, d))),
    "free-scalar": ("Z off the manifold, T a number", lambda V, d: ScalarTransform(_free(_pit(V, d)))),
}
OF_A_TABLE: dict[str, tuple[str, Callable[[int, int], mt.TokenInterface]]] = {
    "table": ("M = (WᵀW)⁻¹, PIT as a free table", mt.PIT),
    "table-half": ("M = (WᵀW)^(-1/2)", lambda V, d: TableTimes(V, d, 0.5)),
    "table-transpose": ("M = I, transpose tying", lambda V, d: TableTimes(V, d, 0.0)),
    "table-matrix": ("M a free matrix", lambda V, d: TableTimes(V, d, None)),
}
VARIANTS = OF_A_MEMORY | OF_A_TABLE


@dataclass(frozen=True)
class Options:
    """Settings of the experiment."""

    preset: str = "nano"
    data: str = "stdlib"
    tokens: tuple[int, ...] = (614_400, 1_843_200)
    """Training tokens per run."""
    variants: tuple[str, ...] = ("memory", "table")
    """Names of variants; ``memory`` and ``table`` select all of their kind."""
    seeds: int = 3
    out: Path | None = None
    """JSON file to append results to."""


def trained(options: Options, name: str, tokens: int, seed: int) -> dict[str, Any]:
    """Final validation loss and ‖W_out E − I‖ of one run."""
    steps = round(tokens / Settings().tokens_per_step)
    given = Settings(preset=options.preset, data=options.data, steps=steps)
    run = resolve(TrainConfig(out=Path("unused"), interface="pit-trainable", seed=seed, settings=given))
    settings = run.settings
    data = run_data(load_data(run), settings, seed)
    torch.manual_seed(seed)
    shape = settings.model
    model = Llama(shape, VARIANTS[name][1](shape.vocab_size, shape.hidden_size))
    memory = {"lr": settings.memory_lr, "slows_after": settings.memory_slows_after}
    rates: dict[str, dict[str, Any]] = {f"*{MEMORY}": memory, "*interface*.memory": memory}
    rates[f"*{FACTOR}"] = transform_rates(shape.hidden_size, settings, {})
    rate = ENTRY_STEP * mt.tying.tied_std(shape.hidden_size)
    rates["*interface.table"] = rates["*interface.weight"] = {"lr": rate, "slows_after": SLOWS_AFTER}
    rates["*log_scale"] = {"lr": settings.transform_lr}
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    used = {k: v for k, v in rates.items() if any(n.endswith(k.rpartition("*")[2]) for n in names)}
    groups = param_groups(model, manifold_lr=settings.memory_lr, overrides=used)
    assert settings.lr is not None and settings.betas is not None
    optimizer = mt.optim.RiemannianAdam(groups, settings.lr, settings.betas)
    peaks = [group["lr"] for group in optimizer.param_groups]
    clipped = [p for n, p in model.named_parameters() if p.requires_grad and not n.endswith((MEMORY, ".memory"))]
    for step in range(settings.steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate_factor(step, settings.steps, settings.warmup_steps or 0, group.get("slows_after"))
        ids, targets = data.batches.batch(step)
        optimizer.zero_grad()
        model.loss(ids, targets).backward()
        torch.nn.utils.clip_grad_norm_(clipped, settings.clip)
        optimizer.step()
    loss = validation_loss(model.loss, data.held_out, torch.device("cpu"), Processes.from_settings(settings))
    E, W_out = model.interface.materialize()
    off = (W_out.double() @ E.double() - torch.eye(shape.hidden_size)).norm().item()
    return {"variant": name, "tokens": tokens, "seed": seed, "val_loss": loss, "delta_ti": off}


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    kept: dict[str, Any] = {"rows": []}
    if options.out is not None and options.out.exists():
        kept = json.loads(options.out.read_text(encoding="utf-8"))
    kept |= {
        "preset": options.preset,
        "data": options.data,
        "commit": commit(),
        "machine": machine(torch.device("cpu")),
    }
    groups = {"memory": OF_A_MEMORY, "table": OF_A_TABLE}
    names = [name for given in options.variants for name in groups.get(given, [given])]
    done = {(row["variant"], row["tokens"], row["seed"]) for row in kept["rows"]}
    for tokens in options.tokens:
        for seed in range(options.seeds):
            for name in names:
                if (name, tokens, seed) not in done:
                    row = trained(options, name, tokens, seed)
                    print(row, flush=True)
                    kept["rows"].append(row)
                    if options.out is not None:
                        options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
