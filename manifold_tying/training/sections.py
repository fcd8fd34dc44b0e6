"""The settings of a run in sections, each with the bounds of its numbers. A section is a group of command-line options."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from manifold_tying.manifolds import Retraction
from manifold_tying.parametrizations import Diagonal
from manifold_tying.poet.spec import Init
from manifold_tying.tying.huggingface._convert import Start

Interface = Literal["untied", "transpose", "pit-frozen", "pit-trainable", "pit-free"]
Body = Literal["adamw", "poet-block", "poet-full"]
Parallel = Literal["none", "ddp", "fsdp", "hsdp"]
OnNan = Literal["stop", "skip"]
SecondMoment = Literal["element", "row", "matrix"]


class Bounds(NamedTuple):
    """What a number may be: at least ``low``, or above it where ``open``, finite, and at most ``high``."""

    low: float
    high: float = math.inf
    open: bool = False


LARGEST_RATE = 1e34  # Adam divides its first steps by 1 - beta, and their size is a float32
Count = Annotated[int, Bounds(1)]
Rate = Annotated[float, Bounds(0, LARGEST_RATE)]
NonNegative = Annotated[float, Bounds(0)]
Positive = Annotated[float, Bounds(0, open=True)]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model."""

    preset: str = "nano"
    """Shape of the model, see manifold_tying.models.PRESETS; not used with init_from."""
    body: Body = "adamw"
    """How the blocks' matrices train: as they are, or as POET's R W0 P by its scheme block or full."""
    embedding_norm: bool | None = None
    """RMS-normalize the looked-up embeddings."""
    embedding_scale: Positive | None = None
    """Multiply the looked-up embeddings, after their norm if there is one; Gemma multiplies by the root of the width."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Continued pretraining: the checkpoint to go on from."""

    init_from: Path | None = None
    """Folder of a transformers checkpoint to go on from, with tied tables, or a converted one (PIT arms). Its
    tokenizer.json is used."""
    init_transform: Start = "head"
    """init_from, PIT arms: where T starts: the identity, or such that the head or the embedding computes what it did;
    rotation is the latter after a rotation of the residual stream, with the head's scales in the final norm's gain."""
    bridge: bool = False
    """init_from, PIT arms: keep the function exactly by a d x d matrix on both sides; gives up W_out E = I of the model."""
    lora_rank: Count | None = None
    """init_from: train low-rank updates of the blocks' matrices in their place; plain tables stay, PIT's Z and T train."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Text and tokenizer."""

    data: str = "stdlib"
    """Corpus: stdlib, docstrings[:PACKAGE,...], text:PATH[,PATH...], jsonl:PATH[,PATH...], parquet:PATH[,PATH...],
    hf:NAME[:CONFIG[:SPLIT]] or tokens:DIR."""
    tokenizer: Path | None = None
    """A tokenizer.json to use; None trains a byte-level BPE on the corpus."""
    val_tokens: Count = 16384
    """Held-out tokens to evaluate on, the same for every run; all there are where a corpus has fewer."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """Length of the run and size of its batches."""

    steps: Count = 180
    """Optimizer steps."""
    batch_size: Count = 8
    """Sequences per step."""
    sequence_length: Count = 128
    """Tokens per sequence."""
    accumulate: Count = 1
    """Parts that a step's batch is processed in, one after the other, to save memory; divides batch_size."""
    eval_every: Count | None = None
    """Steps between evaluations; None is a fifth of the steps."""
    checkpoint_every: Count | None = None
    """Steps between checkpoints; None saves at the end only."""


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The optimizer, and the rates of whatever has none of its own below."""

    lr: Rate | None = None
    """Peak learning rate of the body, or of its low-rank updates, and of token tables without a rate of their own; with POET,
    of every parameter that is not rotated."""
    betas: tuple[float, float] | None = None
    """Adam's averaging of gradients and of their squares; None is 0.9, 0.99, and 0.9, 0.95 where a checkpoint is continued."""
    weight_decay: NonNegative = 0.0
    """Of the body's matrices; never of memory, transform or skew vectors."""
    warmup_steps: Annotated[int, Bounds(0)] | None = None
    """Linear warm-up; None is a tenth of the steps, at most 1000. A cosine to a tenth of the peak follows."""
    clip: NonNegative = 1.0
    """Largest norm of the gradient of everything but the memory."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Plain and free token tables: untied, transpose, pit-free."""

    table_lr: Rate | None = None
    """Peak learning rate of plain and free token tables; None is the body's."""
    table_slows_after: Annotated[int, Bounds(0)] | None = None
    """Steps n after which their rate is also multiplied by √(n / step); 0 is never."""
    table_std: NonNegative | None = None
    """Standard deviation that plain and free token tables start with."""
    logit_scale: bool | None = None
    """Plain token tables: multiply the logits by a learned scale."""
    input_gradient_scale: Positive | None = None
    """transpose: multiply the lookup's part of the table's gradient (arXiv 2603.26663)."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """PIT's trainable memory Z: pit-trainable."""

    memory_lr: Rate | None = None
    """Peak learning rate of a trainable memory."""
    memory_slows_after: Annotated[int, Bounds(0)] | None = None
    """Steps n after which a trainable memory's rate is also multiplied by √(n / step); 0 is never."""
    retraction: Retraction | None = None
    """How a trainable memory stays orthonormal; None is polar, of a converted checkpoint what it was made with."""
    retract_every: Count = 1
    """Project the memory's gradient every so many steps; the memory is retracted at every step."""
    second_moment: SecondMoment = "element"
    """Adam's second moment of a trainable memory."""


@dataclass(frozen=True, kw_only=True)
class Transform:
    """PIT's transform T: pit-frozen, pit-trainable."""

    transform_lr: Rate | None = None
    """Peak learning rate of the transform's Cholesky factor L."""
    off_diagonal_scale: NonNegative | None = None
    """Learning rate of L's off-diagonal entries over transform_lr; None is 0.1, and 1 where a checkpoint is continued."""
    diagonal: Diagonal | None = None
    """Map that keeps the transform's diagonal positive; exp lets its scale grow faster than softplus at the same rate. None is
    exp, of a converted checkpoint what it has."""


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """Penalties on T: every PIT interface."""

    log_det_penalty: NonNegative = 0.0
    """Weight of (log det T / d)² in the loss."""
    diagonal_penalty: NonNegative = 0.0
    """Weight of the mean of (log L_ii)² in the loss."""


@dataclass(frozen=True, kw_only=True)
class Poet:
    """POET's bodies: poet-block, poet-full."""

    block_size: int | None = None
    """poet-block: b, the size of the blocks that rotate; None is 256, in narrow models half the hidden size."""
    fraction: float = 0.5
    """poet-full: the share of the dimensions that rotates between two merges."""
    cayley_terms: int | None = None
    """POET: terms of the Neumann series for the Cayley map. None is the exact map: at the recipe's rates ‖A‖ passes 0.6
    between merges, where two terms, which are faster, are orthogonal to 0.04 only."""
    merge_every: Count | None = None
    """POET: steps between merges; None is 400, in short runs fewer."""
    init: Init = "normalized"
    """POET: what W0 is drawn from; keep is AdamW's own initial weight."""
    out_share: float | None = None
    """POET: share of the parameters that goes to R, the rest to P; None is the same block size on both sides."""
    equivalence_lr: Rate | None = None
    """Peak learning rate of POET's skew vectors."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the run is carried out."""

    device: str = "cpu"
    """cpu, cuda or cuda:N. On CUDA the body runs in bfloat16 autocast."""
    compile: bool = False
    """Compile the model with torch.compile."""
    parallel: Parallel | None = None
    """How the processes that torchrun started share the work: ddp, fsdp (the model sharded over all of them) or hsdp (sharded
    within a node, replicated over nodes); None is none for one process and fsdp for several."""
    timeout: Annotated[float, Bounds(1)] = 600.0
    """Seconds that a process waits for the others before the run ends."""
    on_nan: OnNan = "stop"
    """Where loss or gradient is NaN or Inf: stop the run, or skip the step (ten in a row stop it, too)."""
    keep_checkpoints: Count | None = 2
    """How many of the newest stay; None keeps every one, to look at the course of a run (training.load_model)."""


def check_value(name: str, value: object, hint: Any) -> None:
    """ValueError for a number out of the bounds of its type, and for a word that is none of its choices."""
    if value is None:
        return
    for kind in (hint, *get_args(hint)):
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(get_args(kind))}")
        for bounds in getattr(kind, "__metadata__", ()):
            assert isinstance(value, int | float)
            low, high, is_open = bounds
            if not (low < value if is_open else low <= value) or value == math.inf:
                raise ValueError(f"expected {name} {'>' if is_open else '>='} {low:g}, got {value}")
            if value > high:
                raise ValueError(f"expected {name} <= {high:g}, got {value}: no step of that size fits into float32")
