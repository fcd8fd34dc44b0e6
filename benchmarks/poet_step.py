"""Time and memory of a full training step with POET's bodies and with plain AdamW, at the shapes of POET's Table 8.

    python -m benchmarks.poet_step --rows poet-60m --rounds 5

A step is forward, backward and optimizer on random tokens, in sequences of 256 as in the paper, as `manifold-tying train`
builds it with untied tables. It excludes merges, one in several hundred steps. Extra memory is the peak of a fresh process
above its memory after imports: weights, gradients, the optimizer's state and activations. "Table 1" is the paper's count of
float32 bytes for the body: AdamW's weights and two moments, or POET's W0 plus three times its trainable parameters. It
excludes gradients, tables and activations.

"official POET" is the same model with the layers and the optimizer of POET's authors: blocks of 256, four terms. Its layers
compile themselves, and its extra memory includes what the compiler allocates.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from benchmarks._command import Options, run
from benchmarks._harness import Contender, Extra, Row, Step, significant
from benchmarks._limits import LIMIT, refuse_large
from benchmarks._peers import official_poet
from benchmarks.training_step import ShapedSettings, Training
from manifold_tying.models import LlamaConfig, preset
from manifold_tying.poet import equivalences
from manifold_tying.training import TrainConfig, resolve
from manifold_tying.training.build import build_model, build_optimizer
from manifold_tying.training.processes import ALONE

TITLE = "A whole training step with POET's bodies"
PRESETS = ("poet-60m", "poet-130m", "poet-350m", "poet-1.3b")
BODIES: dict[str, dict[str, Any]] = {
    "adamw": {"body": "adamw"},
    "poet-block 256": {"body": "poet-block", "block_size": 256},
    "poet-block 256, two terms": {"body": "poet-block", "block_size": 256, "cayley_terms": 2},
    "poet-block 64": {"body": "poet-block", "block_size": 64},
    "poet-full 1/2": {"body": "poet-full", "fraction": 0.5},
}


@dataclass(frozen=True)
class StepOptions(Options):
    """Settings of the measurement."""

    tokens: int = 1024
    """Tokens per step."""
    sequence_length: int = 256
    compile: bool = False
    """Also time AdamW and two terms by torch.compile, on a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1 or self.tokens % self.sequence_length:
            raise ValueError(f"expected tokens to be a multiple of {self.sequence_length}, got {self.tokens}")


def _build(name: str, compiled: bool, shape: LlamaConfig, options: StepOptions) -> Step:
    # AdamW needs the most memory: 16 bytes per weight for weight, gradient and moments; 18.6 were measured at poet-350m.
    if name == "adamw":
        refuse_large(18.6 * _weights(shape), torch.device(options.device), "weights, gradients, moments and a step")
    config = _config(name, shape, options)
    model = build_model(config)
    if compiled:
        torch.compiler.reset()
    return _step(model, build_optimizer(model, config.settings), compiled, shape, options)


def _official(shape: LlamaConfig, options: StepOptions) -> Step:
    block_size = min(256, shape.hidden_size)
    poet = official_poet(block_size, shape.hidden_size, shape.intermediate_size, device=options.device)
    model = build_model(_config("adamw", shape, options))
    poet.replace_linear_with_poet(model.blocks, block_size)
    torch.compiler.reset()
    step = _step(model, poet.get_poet_optimizer(model, poet.POETConfig(block_size)), False, shape, options)
    step()  # compiles, which takes longer than the limit of a step
    return step


def _config(name: str, shape: LlamaConfig, options: StepOptions) -> TrainConfig:
    settings = ShapedSettings(device=options.device, shape=shape, **BODIES[name])
    return resolve(TrainConfig(out=Path("unused"), interface="untied", settings=settings))


def _step(model: Any, optimizer: Any, compiled: bool, shape: LlamaConfig, options: StepOptions) -> Step:
    generator = torch.Generator().manual_seed(0)
    size = (options.tokens // options.sequence_length, options.sequence_length)
    ids = torch.randint(shape.vocab_size, size, generator=generator).to(options.device)
    loss_of = ALONE.wrap(model, compiled)

    def loss(ids: Tensor) -> Tensor:
        return loss_of(ids, ids.roll(-1, 1))

    return Training(model, optimizer, loss, [ids], options.autocast())


def _weights(shape: LlamaConfig) -> int:
    """Number of parameters of the plain model with untied tables."""
    d, inner = shape.hidden_size, shape.num_heads * shape.head_dim
    block = 2 * d * inner + 2 * d * shape.num_kv_heads * shape.head_dim + 3 * d * shape.intermediate_size
    return shape.num_layers * block + 2 * shape.vocab_size * d


def _counts(steps: Mapping[str, Step], milliseconds: Mapping[str, float]) -> Extra:
    models: dict[str, Any] = {name: step.model for name, step in steps.items() if isinstance(step, Training)}
    body = {name: sum(p.numel() for p in _matrices(model)) for name, model in models.items()}
    fixed = {
        name: sum(part.ordered_base.numel() for _, part, _ in equivalences(model))
        + sum(p.numel() for p in model.parameters() if not p.requires_grad)  # the official code's W0
        for name, model in models.items()
    }
    return {
        "trainable in the body": {name: float(count) for name, count in body.items()},
        "Table 1, MB": {name: significant(4e-6 * (fixed[name] + 3 * body[name])) for name in models},
    }


def _matrices(model: Any) -> list[Tensor]:
    """Trained parameters of the blocks except norms: matrices, or POET's skew vectors."""
    return [p for name, p in model.blocks.named_parameters() if p.requires_grad and "norm" not in name]


def rows(options: StepOptions) -> Iterator[Row]:
    """A row for each preset."""
    for name in PRESETS:
        shape = preset(name)
        if options.quick:
            small: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16, "num_layers": 1, "intermediate_size": 32}
            shape = dataclasses.replace(shape, num_heads=2, num_kv_heads=2, head_dim=8, **small)
        contenders = [
            Contender(body, partial(_build, body, False, shape, options), limit=10 * LIMIT)  # time all of them fully
            for body in BODIES
        ]
        for body in ("adamw", "poet-block 256, two terms") if options.compile else ():
            build = partial(_build, body, True, shape, options)
            contenders.append(Contender(f"{body}, compiled", build, limit=10 * LIMIT))
        # The last, since it compiles when it is built, and the others reset the compiler.
        contenders.append(Contender("official POET", partial(_official, shape, options), limit=10 * LIMIT))
        reference = "poet-block 256" if name == PRESETS[-1] else "adamw"
        yield Row(f"{name}, {options.tokens} tokens", reference, contenders, _counts, whole_memory=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(StepOptions, description=__doc__, args=arguments)
    run("poet_step", TITLE, rows(options), options, arguments, memory=True)


if __name__ == "__main__":
    main()
