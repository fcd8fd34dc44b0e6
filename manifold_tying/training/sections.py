"""The settings of a run and their bounds. Each section is a group of command-line options."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from manifold_tying import precision
from manifold_tying.huggingface.conversion import Start
from manifold_tying.manifolds import Retraction
from manifold_tying.parametrizations import Diagonal
from manifold_tying.poet import Init

Interface = Literal["untied", "transpose", "pit-frozen", "pit-trainable", "pit-free"]
Body = Literal["adamw", "muon", "hyperball", "stiefel", "stiefel-muon", "isospectral", "poet-block", "poet-full"]
MemoryRule = Literal["adam", "muon"]
Parallel = Literal["none", "ddp", "fsdp", "hsdp"]
OnNan = Literal["stop", "skip"]
SecondMoment = Literal["element", "row", "matrix"]


class Bounds(NamedTuple):
    """Finite numbers in [low, high], or in (low, high] if ``open``."""

    low: float
    high: float = math.inf
    open: bool = False


LARGEST = 1e34  # Adam's first step sizes, lr / (1 - beta), must fit into float32
Count = Annotated[int, Bounds(1, 2**31 - 1)]
Rate = Annotated[float, Bounds(0, LARGEST)]
NonNegative = Annotated[float, Bounds(0, LARGEST)]
Positive = Annotated[float, Bounds(0, LARGEST, open=True)]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model."""

    preset: str = "nano"
    """Model shape; see manifold_tying.models.PRESETS. Not used with init_from."""
    vocabulary: Count | None = None
    """Number of tokens of the vocabulary; None is the preset's."""
    body: Body = "adamw"
    """How the blocks' matrices train. adamw, muon: directly. hyperball: with a fixed norm, by Muon. stiefel, stiefel-muon: with
    orthonormal columns, by Adam or Muon. isospectral: with fixed singular values, by Adam. poet-block, poet-full: as R W0 P."""
    body_lr: Rate | None = None
    """Peak learning rate of what the body trains, unless that is adamw: matrices, points, or POET's skew vectors."""
    embedding_norm: bool | None = None
    """RMS-normalize the embeddings after the lookup."""
    embedding_scale: Positive | None = None
    """Multiply the embeddings after the lookup and its norm; Gemma multiplies by √d."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Continued pretraining from a checkpoint."""

    init_from: Path | None = None
    """Folder of a transformers checkpoint with tied tables, or a converted one (PIT arms). Its tokenizer.json is used."""
    init_transform: Start = "head"
    """PIT: initial T. `identity`: T = I. `head`, `embedding`: T such that this side is unchanged. `rotation`: as embedding,
    after rotating the residual stream; the head's scales move into the final norm."""
    lora_rank: Count | None = None
    """Train low-rank updates of the blocks' matrices. Plain tables are frozen; PIT's Z and T still train."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Text and tokenizer."""

    data: str = "stdlib"
    """Corpus: stdlib, docstrings[:PACKAGE,...], text:PATH[,PATH...], jsonl:PATH[,PATH...], parquet:PATH[,PATH...],
    hf:NAME[:CONFIG[:SPLIT]] or tokens:DIR."""
    tokenizer: Path | None = None
    """A tokenizer.json; None trains a byte-level BPE on the corpus."""
    val_tokens: Count = 16384
    """Held-out tokens per evaluation, the same for every run; all of them if the corpus has fewer."""


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
    """Gradient-accumulation micro-batches per step; must divide batch_size."""
    eval_every: Count | None = None
    """Steps between evaluations; None is a fifth of the steps."""
    checkpoint_every: Count | None = None
    """Steps between checkpoints; None saves only at the end."""


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The optimizer, and the rates of all parameters without their own rate below."""

    lr: Rate | None = None
    """Peak learning rate of the body (or its low-rank updates) and of tables without their own; with POET, of every
    parameter that is not rotated. None is the recipe's (docs/learning-rates.md), as for the rates below."""
    betas: tuple[float, float] | None = None
    """Adam's betas; None is 0.9, 0.99, and 0.9, 0.95 with init_from."""
    weight_decay: NonNegative = 0.0
    """Weight decay of ordinary matrices, tables included; never applied to the memory, the transform or a constrained body."""
    warmup_steps: Annotated[int, Bounds(0)] | None = None
    """Steps of linear warm-up, before a cosine to a tenth of the peak; None is a tenth of the steps, at most 1000."""
    clip: Positive = 1.0
    """Maximum gradient norm, over all parameters except the memory; 1e9 turns clipping off."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Plain and free token tables: untied, transpose, pit-free."""

    table_lr: Rate | None = None
    """Peak learning rate of the tables; None is lr, and 0.3 table_std for pit-free."""
    table_slows_after: Annotated[int, Bounds(0)] | None = None
    """After this number n of steps, multiply their rate by √(n / step); 0 means never."""
    table_std: NonNegative | None = None
    """Initial standard deviation; None is 0.06, and at most 7.68 / d in tied tables."""
    logit_scale: bool | None = None
    """untied, transpose: multiply the logits by a learned scale."""
    input_gradient_scale: Positive | None = None
    """transpose: multiply the embedding's part of the table's gradient (arXiv 2603.26663)."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """PIT's trainable memory Z: pit-trainable."""

    memory_lr: Rate | None = None
    """Peak learning rate of Z."""
    memory_slows_after: Annotated[int, Bounds(0)] | None = None
    """After this number n of steps, multiply its rate by √(n / step); 0 means never."""
    retraction: Retraction | None = None
    """Retraction to the Stiefel manifold; None is polar, or the one recorded in a converted checkpoint."""
    project_every: Count = 1
    """Project Z's gradient every n steps. Z is retracted at every step."""
    memory_rule: MemoryRule = "adam"
    """What moves Z: Riemannian Adam, or Riemannian Muon."""
    second_moment: SecondMoment = "element"
    """Granularity of Adam's second moment for Z."""


@dataclass(frozen=True, kw_only=True)
class Transform:
    """PIT's transform T: pit-frozen, pit-trainable."""

    transform_lr: Rate | None = None
    """Peak learning rate of the Cholesky factor L."""
    off_diagonal_scale: NonNegative | None = None
    """Learning rate of L's off-diagonal entries divided by transform_lr; None is 0.1, and 1 with init_from."""
    diagonal: Diagonal | None = None
    """Map that keeps L's diagonal positive. At the same rate, its scale grows faster with exp than with softplus. None is
    exp, or the one recorded in a converted checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Poet:
    """POET's bodies: poet-block, poet-full."""

    block_size: int | None = None
    """poet-block: size b of the rotated blocks; None is 256, or half the hidden size if that is smaller."""
    fraction: float = 0.5
    """poet-full: share of the dimensions that rotate between two merges."""
    cayley_terms: int | None = None
    """Terms of the Neumann series for the Cayley map; None is the exact map. Two terms are faster on a GPU, but at the recipe's
    rates orthogonal only to 0.04: ‖A‖ exceeds 0.6 between merges."""
    merge_every: Count | None = None
    """Steps between merges; None is 400, fewer in short runs."""
    init: Init = "normalized"
    """Distribution of W0; keep is the initial weight of an AdamW body."""
    out_share: float | None = None
    """Share of the parameters in R, the rest in P; None gives both sides the same block size."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Device, parallelism and error handling."""

    device: str = "cpu"
    """cpu, cuda or cuda:N. On CUDA the body runs under bfloat16 autocast."""
    compile: bool = False
    """Compile the model with torch.compile."""
    parallel: Parallel | None = None
    """How torchrun's processes share the work: ddp; fsdp shards over all; hsdp shards within a node and replicates across
    nodes. None is none for one process and fsdp for several."""
    timeout: Annotated[float, Bounds(1)] = 600.0
    """Seconds that a process waits for the others before the run fails."""
    on_nan: OnNan = "stop"
    """On a NaN or infinite loss or gradient: stop, or skip the step. Ten skipped steps in a row also stop the run."""
    keep_checkpoints: Count | None = 2
    """Number of newest checkpoints to keep; None keeps all, for training.load_model."""


def check_value(name: str, value: object, hint: Any) -> None:
    """Raises ValueError for a number outside its type's bounds, or a word that is not a choice."""
    if value is None:
        return
    for kind in (hint, *get_args(hint)):
        if get_origin(kind) is Literal:
            precision.check_choice(name, value, kind)
        for bounds in filter(lambda found: isinstance(found, Bounds), getattr(kind, "__metadata__", ())):
            if not isinstance(value, int | float):
                raise ValueError(f"expected {name} to be a number, got {value!r}")
            low, high, is_open = bounds
            if not (low < value if is_open else low <= value) or value == math.inf:
                raise ValueError(f"expected {name} {'>' if is_open else '>='} {low:g}, got {value}")
            if value > high:
                raise ValueError(f"expected {name} <= {high:g}, got {value}; larger numbers overflow")
