"""The settings of a run, which are also the command line's options."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from manifold_tying.manifolds import Retraction, check_retraction
from manifold_tying.models import LlamaConfig, preset
from manifold_tying.parametrizations import CholeskyFactor, Diagonal
from manifold_tying.poet.spec import Init, check_options
from manifold_tying.training._hugging_face_shape import read_shape
from manifold_tying.training._machine import check_device
from manifold_tying.tying.huggingface._convert import Start

LARGEST_RATE = 1e34  # Adam divides its first steps by 1 - beta, and their size is a float32
Interface = Literal["untied", "transpose", "pit-frozen", "pit-trainable", "pit-free"]
Body = Literal["adamw", "poet-block", "poet-full"]
CONTINUED_SETTINGS = ("init_from", "init_transform", "bridge", "lora_rank")  # of no run from scratch
Parallel = Literal["none", "ddp", "fsdp", "hsdp"]
OnNan = Literal["stop", "skip"]
SecondMoment = Literal["element", "row", "matrix"]
POET_SETTINGS = (
    "block_size", "fraction", "cayley_terms", "merge_every", "init", "out_share", "equivalence_lr"
)  # fmt: skip
# How a run is carried out; a resumed one may differ in it.
ELSEWHERE = ("parallel", "timeout", "on_nan", "keep_checkpoints")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be chosen for a run; None means the recipe's value (docs/learning-rates.md)."""

    preset: str = "nano"
    """Shape of the model, see manifold_tying.models.PRESETS; not used with init_from."""
    init_from: Path | None = None
    """Folder of a transformers checkpoint to go on from, with tied tables, or a converted one (PIT arms). Its
    tokenizer.json is used."""
    init_transform: Start = "head"
    """init_from, PIT arms: where T starts: the identity, or such that the head or the embedding computes what it did;
    rotation is the latter after a rotation of the residual stream, with the head's scales in the final norm's gain."""
    bridge: bool = False
    """init_from, PIT arms: keep the function exactly by a d x d matrix on both sides; gives up W_out E = I of the model."""
    lora_rank: int | None = None
    """init_from: train low-rank updates of the blocks' matrices in their place; plain tables stay, PIT's Z and T train."""
    data: str = "stdlib"
    """Corpus: stdlib, docstrings[:PACKAGE,...], text:PATH[,PATH...], jsonl:PATH[,PATH...], parquet:PATH[,PATH...],
    hf:NAME[:CONFIG[:SPLIT]] or tokens:DIR."""
    tokenizer: Path | None = None
    """A tokenizer.json to use; None trains a byte-level BPE on the corpus."""
    steps: int = 180
    """Optimizer steps."""
    batch_size: int = 8
    """Sequences per step."""
    sequence_length: int = 128
    """Tokens per sequence."""
    accumulate: int = 1
    """Parts that a step's batch is processed in, one after the other, to save memory; divides batch_size."""
    device: str = "cpu"
    """cpu, cuda or cuda:N. On CUDA the body runs in bfloat16 autocast."""
    compile: bool = False
    """Compile the model with torch.compile."""
    body: Body = "adamw"
    """How the blocks' matrices train: as they are, or as POET's R W0 P by its scheme block or full."""
    block_size: int | None = None
    """poet-block: b, the size of the blocks that rotate; None is 256, in narrow models half the hidden size."""
    fraction: float = 0.5
    """poet-full: the share of the dimensions that rotates between two merges."""
    cayley_terms: int | None = None
    """POET: terms of the Neumann series for the Cayley map. None is the exact map: at the recipe's rates ‖A‖ passes 0.6
    between merges, where two terms, which are faster, are orthogonal to 0.04 only."""
    merge_every: int | None = None
    """POET: steps between merges; None is 400, in short runs fewer."""
    init: Init = "normalized"
    """POET: what W0 is drawn from; keep is AdamW's own initial weight."""
    out_share: float | None = None
    """POET: share of the parameters that goes to R, the rest to P; None is the same block size on both sides."""
    lr: float | None = None
    """Peak learning rate of the body, or of its low-rank updates, and of token tables without a rate of their own; with POET,
    of every parameter that is not rotated."""
    equivalence_lr: float | None = None
    """Peak learning rate of POET's skew vectors."""
    memory_lr: float | None = None
    """Peak learning rate of a trainable memory."""
    memory_slows_after: int | None = None
    """Steps n after which a trainable memory's rate is also multiplied by √(n / step); 0 is never."""
    table_lr: float | None = None
    """Peak learning rate of plain and free token tables; None is the body's."""
    table_slows_after: int | None = None
    """Steps n after which their rate is also multiplied by √(n / step); 0 is never."""
    transform_lr: float | None = None
    """Peak learning rate of the transform's Cholesky factor L."""
    off_diagonal_scale: float | None = None
    """Learning rate of L's off-diagonal entries over transform_lr; None is 0.1, and 1 where a checkpoint is continued."""
    table_std: float | None = None
    """Standard deviation that plain and free token tables start with."""
    embedding_norm: bool | None = None
    """RMS-normalize the looked-up embeddings."""
    embedding_scale: float | None = None
    """Multiply the looked-up embeddings, after their norm if there is one; Gemma multiplies by the root of the width."""
    input_gradient_scale: float | None = None
    """transpose: multiply the lookup's part of the table's gradient (arXiv 2603.26663)."""
    logit_scale: bool | None = None
    """Plain token tables: multiply the logits by a learned scale."""
    diagonal: Diagonal | None = None
    """Map that keeps the transform's diagonal positive; exp lets its scale grow faster than softplus at the same rate. None is
    exp, of a converted checkpoint what it has."""
    retraction: Retraction | None = None
    """How a trainable memory stays orthonormal; None is polar, of a converted checkpoint what it was made with."""
    retract_every: int = 1
    """Project the memory's gradient every so many steps; the memory is retracted at every step."""
    second_moment: SecondMoment = "element"
    """Adam's second moment of a trainable memory."""
    weight_decay: float = 0.0
    """Of the body's matrices; never of memory, transform or skew vectors."""
    betas: tuple[float, float] | None = None
    """Adam's averaging of gradients and of their squares; None is 0.9, 0.99, and 0.9, 0.95 where a checkpoint is continued."""
    warmup_steps: int | None = None
    """Linear warm-up; None is a tenth of the steps, at most 1000. A cosine to a tenth of the peak follows."""
    clip: float = 1.0
    """Largest norm of the gradient of everything but the memory."""
    log_det_penalty: float = 0.0
    """Weight of (log det T / d)² in the loss."""
    diagonal_penalty: float = 0.0
    """Weight of the mean of (log L_ii)² in the loss."""
    eval_every: int | None = None
    """Steps between evaluations; None is a fifth of the steps."""
    val_tokens: int = 16384
    """Held-out tokens to evaluate on, the same for every run; all there are where a corpus has fewer."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None saves at the end only."""
    keep_checkpoints: int | None = 2
    """How many of the newest stay; None keeps every one, to look at the course of a run (training.load_model)."""
    parallel: Parallel | None = None
    """How the processes that torchrun started share the work: ddp, fsdp (the model sharded over all of them) or hsdp (sharded
    within a node, replicated over nodes); None is none for one process and fsdp for several."""
    timeout: float = 600.0
    """Seconds that a process waits for the others before the run ends."""
    on_nan: OnNan = "stop"
    """Where loss or gradient is NaN or Inf: stop the run, or skip the step (ten in a row stop it, too)."""

    def __post_init__(self) -> None:
        preset(self.preset)
        if self.retraction is not None:
            check_retraction(self.retraction)
        if self.diagonal is not None:
            CholeskyFactor(self.diagonal)
        check_start(self)
        if self.body not in get_args(Body):
            raise ValueError(f"unknown body {self.body!r}; choose one of {', '.join(get_args(Body))}")
        choices_of = {
            "parallel": (None, *get_args(Parallel)), "on_nan": get_args(OnNan), "second_moment": get_args(SecondMoment)
        }  # fmt: skip
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose one of {choices}")
        block_size = 256 if self.block_size is None else self.block_size
        check_options("full", block_size, self.fraction, self.cayley_terms, self.init, None, self.out_share)
        for name, scale in (
            ("embedding_scale", self.embedding_scale),
            ("input_gradient_scale", self.input_gradient_scale),
        ):
            if scale is not None and not 0 < scale < math.inf:
                raise ValueError(f"expected {name} > 0, got {scale}")
        at_least: dict[str, float] = {
            "steps": 1, "batch_size": 1, "sequence_length": 1, "accumulate": 1, "retract_every": 1, "warmup_steps": 0,
            "eval_every": 1, "val_tokens": 1, "checkpoint_every": 1, "keep_checkpoints": 1, "weight_decay": 0, "lr": 0,
            "memory_lr": 0, "transform_lr": 0, "table_std": 0, "clip": 0, "log_det_penalty": 0, "diagonal_penalty": 0,
            "merge_every": 1, "equivalence_lr": 0, "lora_rank": 1, "timeout": 1, "memory_slows_after": 0,
            "table_lr": 0, "table_slows_after": 0,
            "off_diagonal_scale": 0,
        }  # fmt: skip
        for name, low in at_least.items():
            value = getattr(self, name)
            if value is not None and not (low <= value < math.inf):
                raise ValueError(f"expected {name} >= {low:g}, got {value}")
            if name.endswith("lr") and value is not None and value > LARGEST_RATE:
                raise ValueError(
                    f"expected {name} <= {LARGEST_RATE:g}, got {value}: no step of that size fits into float32"
                )
        if self.betas is not None and not (
            isinstance(self.betas, tuple) and len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        ):
            raise ValueError(f"expected betas to be two numbers in [0, 1), got {self.betas}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"expected accumulate to divide batch_size={self.batch_size}, got {self.accumulate}")
        check_device(self.device)

    @property
    def model(self) -> LlamaConfig:
        """The model's shape, with this run's embedding norm."""
        return dataclasses.replace(
            preset(self.preset),
            embedding_norm=bool(self.embedding_norm),
            embedding_scale=1.0 if self.embedding_scale is None else self.embedding_scale,
        )

    @property
    def vocab_size(self) -> int:
        """Of the preset or of the checkpoint that the run goes on from."""
        return self.model.vocab_size if self.init_from is None else read_shape(self.init_from).vocab_size

    @property
    def poet(self) -> bool:
        """Whether the body trains by orthogonal equivalence."""
        return self.body != "adamw"

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train one model and write DIR/metrics.jsonl, timing.jsonl, TensorBoard events and checkpoints."""

    out: Path
    """Folder to write to."""
    interface: Interface = "pit-trainable"
    """How embedding and head are tied."""
    seed: int = 0
    """Of the initial weights and of the order of the data."""
    resume: bool = False
    """Go on from the newest whole checkpoint in DIR, or start where there is none; damaged ones are set aside."""
    resume_from: str | None = None
    """Go on from this checkpoint in DIR, for instance step-00000040; newer ones are set aside."""
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.interface not in get_args(Interface):
            raise ValueError(f"unknown interface {self.interface!r}; choose one of {', '.join(get_args(Interface))}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"expected seed {'>= 0' if self.seed < 0 else '< 2^64'}, got {self.seed}")
        _check_tables(self.interface, self.settings)
        if "\0" in str(self.out):
            raise ValueError(f"expected out to be a path, got {str(self.out)!r}")

    def as_json(self) -> dict[str, Any]:
        """What identifies the run: everything but where it is written, whether it was resumed and by which processes."""
        unused = CONTINUED_SETTINGS if self.settings.init_from is None else ("preset", *POET_SETTINGS)
        values = {k: v for k, v in dataclasses.asdict(self.settings).items() if k not in (*ELSEWHERE, *unused)}
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
        betas = self.settings.betas
        return {
            "interface": self.interface,
            "seed": self.seed,
            **settings,
            "betas": None if betas is None else list(betas),
        }


def _check_tables(interface: Interface, settings: Settings) -> None:
    """ValueError for settings of tables in a run that has none, or whose tables are those of a checkpoint."""
    tables: tuple[Interface, ...] = ("transpose", "untied", "pit-free") if settings.init_from is None else ("pit-free",)
    needs: dict[str, tuple[Interface, ...]] = {
        "input_gradient_scale": ("transpose",), "logit_scale": ("transpose", "untied"),
        "table_lr": tables, "table_slows_after": tables,
    }  # fmt: skip
    for name, interfaces in needs.items():
        if getattr(settings, name) is not None and interface not in interfaces:
            raise ValueError(f"{name} belongs to {' and '.join(interfaces)}; leave it out of {interface}")


def check_start(settings: Settings) -> None:
    """ValueError unless the settings that belong to ``init_from``, or do not go with it, are given as they make sense."""
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    if settings.init_from is None:
        if given := [name for name in CONTINUED_SETTINGS if getattr(settings, name) != defaults[name]]:
            raise ValueError(f"{', '.join(given)} needs init_from, the folder of the checkpoint to go on from")
        return
    if settings.init_transform not in get_args(Start):
        raise ValueError(
            f"unknown init_transform {settings.init_transform!r}; choose one of {', '.join(get_args(Start))}"
        )
    if settings.bridge and settings.init_transform != defaults["init_transform"]:
        raise ValueError("expected init_transform or bridge, got both: with a bridge T starts at the identity")
    others = (
        "preset", "body", "table_std", "embedding_norm", "embedding_scale", "input_gradient_scale", "logit_scale"
    )  # fmt: skip
    if given := [name for name in others if getattr(settings, name) != defaults[name]]:
        raise ValueError(
            f"{', '.join(given)} cannot be chosen with init_from: shape, tables and body are the checkpoint's. Leave it out"
        )
