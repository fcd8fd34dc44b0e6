"""A run's configuration, and which of its settings identify it."""

import dataclasses
import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from manifold_tying._safetensors import check_readable, weight_map
from manifold_tying.huggingface.checkpoint import read_transformers_config, recorded_mark
from manifold_tying.models import LlamaConfig, preset
from manifold_tying.poet import check_options
from manifold_tying.training import sections
from manifold_tying.training.files import digest
from manifold_tying.training.machine import check_device
from manifold_tying.training.sections import Interface, check_value

ARM = "arm"  # key in config.json only: the same run may have another name
CORPUS = "corpus"  # key of the text's and the first checkpoint's fingerprints in config.json and checkpoints
HASHES = ("config_sha256", "weights_sha256")  # of the first checkpoint
NOT_RECORDED = ("parallel", "timeout", "on_nan", "keep_checkpoints")  # a resumed run may change these
MEMORY_INTERFACES: tuple[Interface, ...] = ("pit-frozen", "pit-trainable")  # Z and T are separate


@dataclass(frozen=True, kw_only=True)
class Settings(  # a dataclass lists the fields of its last base first
    sections.Execution,
    sections.Poet,
    sections.Transform,
    sections.Memory,
    sections.Tables,
    sections.Adam,
    sections.Length,
    sections.Data,
    sections.Checkpoint,
    sections.Model,
):
    """The settings of a run; None means the recipe's value (docs/learning-rates.md)."""

    def __post_init__(self) -> None:
        preset(self.preset)
        block_size = 256 if self.block_size is None else self.block_size
        check_options("full", block_size, self.fraction, self.cayley_terms, self.init, None, self.out_share)
        for name, hint in _TYPES.items():
            check_value(name, getattr(self, name), hint)
        pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        if self.betas is not None and not (pair and all(0 <= beta < 1 for beta in self.betas)):
            raise ValueError(f"expected betas to be two numbers in [0, 1), got {self.betas}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"expected accumulate to divide batch_size={self.batch_size}, got {self.accumulate}")
        check_device(self.device)
        if self.init_from is None:
            if given := self.changed(names_of(sections.Checkpoint)):
                raise ValueError(f"{given} needs init_from, the folder of the checkpoint to continue from")
        elif given := self.changed((*names_of(sections.Model), "table_std", "input_gradient_scale", "logit_scale")):
            raise ValueError(f"{given} cannot be set with init_from, which fixes shape, tables and body. Leave it out")

    def changed(self, names: tuple[str, ...]) -> str:
        """The names whose values are not the defaults, comma-separated."""
        return ", ".join(name for name in names if getattr(self, name) != DEFAULTS[name])

    @property
    def model(self) -> LlamaConfig:
        """The model's shape, with this run's vocabulary and embedding norm."""
        shape = preset(self.preset)
        return dataclasses.replace(
            shape,
            vocab_size=self.vocabulary or shape.vocab_size,
            embedding_norm=bool(self.embedding_norm),
            embedding_scale=1.0 if self.embedding_scale is None else self.embedding_scale,
        )

    @property
    def vocab_size(self) -> int:
        """V of the model, or of the checkpoint with ``init_from``."""
        shape = self.model if self.init_from is None else read_shape(self.init_from)
        return int(shape.vocab_size)

    @property
    def poet(self) -> bool:
        """Whether the body trains with POET."""
        return self.body.startswith("poet")

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length


DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}
_TYPES = get_type_hints(Settings, include_extras=True)


def names_of(section: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(section))


POET_SETTINGS = names_of(sections.Poet)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train one model and write DIR/metrics.jsonl, timing.jsonl, TensorBoard events and checkpoints."""

    out: Path
    """Folder to write to."""
    interface: Interface = "pit-trainable"
    """The token interface: how embedding and head are tied."""
    seed: int = 0
    """Seed for weight initialization and data order."""
    resume: bool = False
    """Resume from the newest intact checkpoint in DIR, or start if there is none; damaged ones are renamed aside-*."""
    resume_from: str | None = None
    """Resume from this checkpoint in DIR, such as step-00000040; newer ones are renamed aside-*."""
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        check_value("interface", self.interface, Interface)
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"expected seed {'>= 0' if self.seed < 0 else '< 2^64'}, got {self.seed}")
        plain = ("transpose", "untied")
        tables = ("pit-free",) if self.settings.init_from is not None else (*plain, "pit-free")
        users: dict[str, tuple[str, ...]] = {
            "input_gradient_scale": ("transpose",), "logit_scale": plain, "table_lr": tables, "table_slows_after": tables
        }  # fmt: skip
        for name, interfaces in users.items():
            if getattr(self.settings, name) is not None and self.interface not in interfaces:
                raise ValueError(f"{name} belongs to {' and '.join(interfaces)}; leave it out of {self.interface}")
        if "\0" in str(self.out):
            raise ValueError(f"expected out to be a path, got {str(self.out)!r}")

    def as_json(self) -> dict[str, Any]:
        """The settings that identify the run: without its folder, resume options and parallelism."""
        unused = names_of(sections.Checkpoint) if self.settings.init_from is None else ("preset", *POET_SETTINGS)
        used = {k: v for k, v in dataclasses.asdict(self.settings).items() if k not in (*NOT_RECORDED, *unused)}
        values = {k: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v for k, v in used.items()}
        return {"interface": self.interface, "seed": self.seed, **values}

    def command(self) -> str:
        """The ``train`` command of this run, quoted for a shell, without the defaults."""
        words = ["manifold-tying", "train", "--out", str(self.out), "--interface", self.interface]
        words += ["--seed", str(self.seed), "--resume"]
        for name, default in DEFAULTS.items():
            value = getattr(self.settings, name)
            if value != default:
                values = [] if default is False else map(str, value) if isinstance(value, tuple) else [str(value)]
                words += [f"--{name.replace('_', '-')}", *values]
        return shlex.join(words)


def unused_settings(interface: Interface, settings: Settings) -> set[str]:
    """The settings that the interface and the body ignore."""
    has_memory, body = interface in MEMORY_INTERFACES, settings.body
    unused: dict[tuple[str, ...], bool] = {
        names_of(sections.Tables): has_memory, names_of(sections.Transform): not has_memory,
        names_of(sections.Memory): interface != "pit-trainable",
        ("second_moment", "project_every"): settings.memory_rule == "muon",
        POET_SETTINGS: not settings.poet, ("fraction",): body == "poet-block", ("block_size",): body == "poet-full",
        ("body_lr",): body == "adamw", ("init_transform",): not interface.startswith("pit"),
    }  # fmt: skip
    return {name for names, is_unused in unused.items() if is_unused for name in names}


def read_shape(folder: Path) -> Any:
    """The language model's configuration; raises ValueError unless the folder is a transformers checkpoint with safetensors."""
    recorded_mark(folder)
    weight_map(folder)
    config = read_transformers_config(folder).get_text_config()
    if not all(isinstance(getattr(config, name, None), int) for name in ("vocab_size", "hidden_size")):
        raise ValueError(f"expected the vocab_size and hidden_size of a language model in {folder / 'config.json'}")
    return config


def checkpoint_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of a transformers checkpoint's config.json, and of all its weights."""
    check_readable(files := [folder / name for name in sorted(set(weight_map(folder).values()))])
    weights = hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()
    return dict(zip(HASHES, (digest(folder / "config.json"), weights), strict=True))


def check_same(where: str, differs: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises ValueError if a setting differs, or else the text or the first checkpoint, if ``current`` knows them."""
    if names := sorted(k for k in {*saved, *current} - {ARM, CORPUS} if saved.get(k) != current.get(k)):
        listed = ", ".join(f"{k} (saved {saved.get(k)!r}, now {current.get(k)!r})" for k in names)
        raise ValueError(f"{where} {differs} {listed}; choose another --out, or use its settings")
    before, now = saved.get(CORPUS) or {}, current.get(CORPUS) or {}
    if changed := [k for k in now if before.get(k) != now[k]]:
        other, what = f"was trained on another text than {current['data']}", "text"
        if changed[0] in HASHES:
            other, what = f"started from another checkpoint than {current['init_from']}", "checkpoint"
        raise ValueError(
            f"{where} {other} is now: {', '.join(changed)} differ, so losses are not comparable. Restore the {what}, or "
            "choose another --out"
        )
