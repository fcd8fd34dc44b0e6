"""Time of a full training step of the reference model with each token interface, and of Hugging Face's Llama.

    python -m benchmarks.training_step --preset nano --tokens 2048 --device cpu

All models have the preset's shape as a plain Llama (sequential blocks, no gate, RMSNorm), because Hugging Face's Llama
supports nothing else. The arms are built as in `manifold-tying train`, with the rates and the embedding norm of its recipe,
but without clipping and schedule. `transformers` is LlamaForCausalLM with tied tables, SDPA attention, torch.optim.AdamW and
its own loss, which shifts the targets. With --dtype bfloat16 all run under autocast, with float32 parameters. The reference is
transpose tying.

On CUDA, the share of the matmul rate is the number of operations divided by the time and by the rate of an 8192 x 8192 bfloat16
matmul in the same run. It counts 6 operations per token and parameter of the transpose-tied model, plus 6 per token, position,
layer and channel for causal attention, forward and backward.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from benchmarks._command import Options, run
from benchmarks._harness import Contender, Extra, Row, Step, significant
from benchmarks._limits import matmul_rate
from benchmarks._peers import load
from experiments.recipes import tied_llama
from manifold_tying.models import LlamaConfig, preset
from manifold_tying.training import Settings, TrainConfig, resolve
from manifold_tying.training.build import build_model, build_optimizer
from manifold_tying.training.sections import Interface

TITLE = "A whole training step"
INTERFACES: tuple[Interface, ...] = ("transpose", "untied", "pit-frozen", "pit-trainable", "pit-free")
BATCHES = 4  # different batches, used in turn
RATE_SIZE = 8192  # size of the matmul that measures a CUDA device's rate


@dataclass(frozen=True)
class StepOptions(Options):
    """Settings of the measurement."""

    preset: str = "nano"
    """Shape of the model, see manifold_tying.models.PRESETS; changed to a plain Llama."""
    tokens: tuple[int, ...] = (2048,)
    """Tokens per step; one row for each number."""
    sequence_length: int = 128
    compile: bool = False
    """Add rows with torch.compile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for tokens in self.tokens:
            if tokens < 1 or tokens % self.sequence_length:
                raise ValueError(f"expected tokens to be a multiple of {self.sequence_length}, got {tokens}")


@dataclass(frozen=True, kw_only=True)
class ShapedSettings(Settings):
    """Settings with a model shape that is not its preset's."""

    shape: LlamaConfig

    @property
    def model(self) -> LlamaConfig:
        return dataclasses.replace(self.shape, embedding_norm=bool(self.embedding_norm))


@dataclass
class Training:
    """Forward, backward and step of a model."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor], Tensor]
    batches: Sequence[Tensor]
    autocast: torch.autocast

    def __post_init__(self) -> None:
        self.turns = itertools.cycle(self.batches)

    def __call__(self) -> None:
        with self.autocast:
            loss = self.loss(next(self.turns))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Problem:
    """Batches of one size for models of one shape."""

    def __init__(self, shape: LlamaConfig, tokens: int, compiled: bool, options: StepOptions) -> None:
        self.shape, self.tokens, self.compiled, self.options = shape, tokens, compiled, options
        self.device = torch.device(options.device)

    @cached_property
    def batches(self) -> list[Tensor]:
        size = (self.tokens // self.options.sequence_length, self.options.sequence_length)
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(self.shape.vocab_size, size, generator=generator).to(self.device) for _ in range(BATCHES)]

    def _training(self, model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor]) -> Step:
        return Training(model, optimizer, loss, self.batches, self.options.autocast())

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self.compiled:
            return function
        # Otherwise code of an earlier row would be recompiled with dynamic shapes. All contenders of a row are built before
        # the first step, so this loses nothing.
        torch.compiler.reset()
        return torch.compile(function)

    def ours(self, interface: Interface) -> Step:
        settings = ShapedSettings(preset=self.options.preset, device=self.options.device, shape=self.shape)
        config = resolve(TrainConfig(out=Path("unused"), interface=interface, settings=settings))
        model = build_model(config)
        loss_of = self._compiled(model.loss)
        return self._training(model, build_optimizer(model, config.settings), lambda ids: loss_of(ids, ids.roll(-1, 1)))

    def transformers(self) -> Step:
        load("transformers", "transformers")
        options: dict[str, Any] = {
            "head_dim": self.shape.head_dim, "attn_implementation": "sdpa", "use_cache": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.shape.rope_theta},
        }  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model: torch.nn.Module = tied_llama(self.shape, self.options.sequence_length, **options)
        model.to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True if self.device.type == "cuda" else None)
        called = self._compiled(model)
        return self._training(model, optimizer, lambda ids: called(input_ids=ids, labels=ids).loss)

    def rates(self, steps: Mapping[str, Step], milliseconds: Mapping[str, float]) -> Extra:
        per_second = {name: self.tokens / ms * 1000 for name, ms in milliseconds.items()}
        extra = {"tokens/s": {name: significant(rate) for name, rate in per_second.items()}}
        transpose = steps.get("transpose")
        if self.device.type == "cuda" and isinstance(transpose, Training):
            peak = matmul_rate(self.device, torch.bfloat16, RATE_SIZE)
            shape = self.shape
            # Scores and weighted values take 12 over all positions; causal attention needs half.
            attention = 6 * self.options.sequence_length * shape.num_layers * shape.num_heads * shape.head_dim
            operations = 6 * sum(p.numel() for p in transpose.model.parameters()) + attention
            extra["share of matmul rate"] = {name: significant(r * operations / peak) for name, r in per_second.items()}
            extra["matmul TFLOP/s"] = {"transpose": significant(peak / 1e12)}
        return extra


def plain(shape: LlamaConfig) -> LlamaConfig:
    """The shape without features that Hugging Face's Llama lacks."""
    return dataclasses.replace(shape, parallel_block=False, gated_attention=False, norm="rmsnorm")


def rows(options: StepOptions) -> Iterator[Row]:
    """A row for each number of tokens, eager and optionally compiled."""
    shape, tokens = plain(preset(options.preset)), options.tokens
    if options.quick:
        sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16, "num_layers": 1, "intermediate_size": 32}
        sizes |= {"num_heads": 4, "num_kv_heads": 4, "head_dim": 4}
        shape, tokens = dataclasses.replace(shape, **sizes), (2 * options.sequence_length,)
    ways = (False, True) if options.compile else (False,)
    return (_row(Problem(shape, count, compiled, options)) for count in tokens for compiled in ways)


def _row(problem: Problem) -> Row:
    contenders = [Contender(name, partial(problem.ours, name)) for name in INTERFACES]
    contenders.append(Contender("transformers", problem.transformers))
    options, how = problem.options, "compiled" if problem.compiled else "eager"
    label = f"{options.preset} plain, {problem.tokens} tokens in sequences of {options.sequence_length}, {how}"
    return Row(label, "transpose", contenders, problem.rates)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(StepOptions, description=__doc__, args=arguments)
    run("training_step", TITLE, rows(options), options, arguments)


if __name__ == "__main__":
    main()
