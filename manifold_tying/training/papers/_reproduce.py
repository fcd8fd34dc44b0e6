"""manifold-tying reproduce: one of the papers' comparisons, at the size that is asked for."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import tyro
from rich.console import Console

from manifold_tying.models import preset
from manifold_tying.training.ablation import MOST_SEEDS, budgets_of
from manifold_tying.training.config import Settings
from manifold_tying.training.files import write_whole
from manifold_tying.training.machine import called_as, machine
from manifold_tying.training.papers import _adapted, _length, _pit, _poet
from manifold_tying.training.papers._budgets import budgets, candidates
from manifold_tying.training.papers._ingredients import ingredients
from manifold_tying.training.papers._source import trained_source
from manifold_tying.training.papers._table import Table
from manifold_tying.training.progress import Started, progress_bars

Name = Literal[
    "pit-from-scratch",
    "pit-continued",
    "pit-adaptation",
    "pit-budgets",
    "pit-ingredients",
    "pit-length",
    "poet-pretraining",
    "poet-initialization",
    "poet-merging",
    "poet-terms",
    "poet-budget",
]
Recipe = Callable[[Path, Settings, int, Started | None], list[Table]]
RECIPES: Mapping[Name, Recipe] = {
    "pit-from-scratch": _pit.from_scratch,
    "pit-continued": _pit.continued,
    "pit-adaptation": _adapted.adapted,
    "pit-ingredients": ingredients,
    "pit-length": _length.length,
    "poet-pretraining": _poet.pretraining,
    "poet-initialization": _poet.initialization,
    "poet-merging": _poet.merging,
    "poet-terms": _poet.terms,
    "poet-budget": _poet.budget,
}
BUDGETS = "pit-budgets"
USUAL_TOKENS = 184_320
CONTINUED = ("pit-continued", "pit-adaptation")
OF_CONTINUED = {"init_from": None, "source_data": "stdlib", "source_tokens": 614_400}


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Run one of the papers' comparisons and write its tables, beside what the paper prints, to DIR/tables.md.

    pit-from-scratch (PIT, Tables 4 and 5), pit-continued (Tables 1 and 2, Figure 3), pit-adaptation (Table 6);
    poet-pretraining (POET, Table 2), poet-initialization (Table 5), poet-merging (Table 6), poet-terms (Table 7 and Figure 10),
    poet-budget (Figure 5). In no paper: pit-budgets (PIT and the strongest plain tables from scratch at several numbers of
    tokens, each at its best of four trials), pit-length (PIT and plain tables over 1.8 M tokens) and pit-ingredients (a trained
    memory without each part of its recipe).
    The same command again only does what is missing.
    """

    name: Annotated[Name, tyro.conf.Positional]
    """Which comparison."""
    out: Path
    """Folder to write to."""
    preset: str = "nano"
    """Shape of the model."""
    tokens: int | str | None = None
    """Training tokens per run; of pit-budgets several, separated by commas. None is 1,843,200 for pit-length, else 184,320."""
    arms: str | None = None
    """pit-budgets: only these, separated by commas."""
    seeds: int = 3
    """Number of seeds; they are 0, 1, ..."""
    data: str | None = None
    """Corpus, as of train; None is stdlib, and docstrings where a checkpoint is continued."""
    batch_size: int = 8
    """Sequences per step."""
    sequence_length: int = 128
    """Tokens per sequence."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    init_from: Path | None = None
    """pit-continued, pit-adaptation: the tied transformers checkpoint to continue; None trains a small one first."""
    source_data: str = "stdlib"
    """Without init_from: what the source is trained on."""
    source_tokens: int = 614_400
    """Without init_from: for how long."""

    def __post_init__(self) -> None:
        if self.name not in get_args(Name):
            raise ValueError(f"unknown comparison {self.name!r}; choose one of {', '.join(get_args(Name))}")
        for name in ("seeds", "source_tokens", *(("tokens",) if isinstance(self.tokens, int) else ())):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.seeds > MOST_SEEDS:
            raise ValueError(f"expected seeds <= {MOST_SEEDS}, got {self.seeds}")
        hidden_size = preset(self.preset).hidden_size
        if self.name != BUDGETS and (self.arms is not None or isinstance(self.tokens, str)):
            raise ValueError(f"arms and several numbers of tokens belong to {BUDGETS}; leave them out of {self.name}")
        if unknown := [arm for arm in self.chosen or () if arm not in candidates(hidden_size)]:
            raise ValueError(f"unknown arms {', '.join(unknown)}; choose from {', '.join(candidates(hidden_size))}")
        if self.name not in CONTINUED and (given := [k for k, v in OF_CONTINUED.items() if getattr(self, k) != v]):
            raise ValueError(f"{', '.join(given)} belong to {', '.join(CONTINUED)}; leave them out of {self.name}")
        self.settings()

    @property
    def chosen(self) -> list[str] | None:
        """The arms that were asked for; None is all."""
        return None if self.arms is None else [arm.strip() for arm in self.arms.split(",")]

    @property
    def budgets(self) -> list[int]:
        """Training tokens per run; several of pit-budgets."""
        size = self.batch_size * self.sequence_length
        if isinstance(self.tokens, str):
            return budgets_of(self.tokens, size)
        usual = _length.TOKENS if self.name == "pit-length" else USUAL_TOKENS
        return [usual if self.tokens is None else self.tokens]

    def settings(self) -> Settings:
        """Of every run of the comparison, but for the checkpoint that it may start from and for further budgets."""
        size = self.batch_size * self.sequence_length
        return Settings(
            preset=self.preset,
            data=self.data or ("docstrings" if self.name in CONTINUED else "stdlib"),
            steps=max(1, round(self.budgets[0] / max(1, size))),
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            device=self.device,
        )


def reproduce(config: ReproduceConfig, *, started: Started | None = None) -> list[Table]:
    """Run what is missing and return the tables, which are also written to ``OUT/tables.md`` and ``OUT/tables.json``."""
    settings = config.settings()
    if config.name in CONTINUED:
        source = config.init_from
        if source is None:
            steps = max(1, round(config.source_tokens / Settings().tokens_per_step))
            source = trained_source(config.out / "source", config.preset, config.source_data, steps, started)
        settings = dataclasses.replace(settings, init_from=source, preset=Settings.preset)
    if config.name == BUDGETS:
        tables = budgets(config.out, settings, config.budgets, config.chosen, config.seeds, started)
    else:
        tables = RECIPES[config.name](config.out, settings, config.seeds, started)
    described: dict[str, Any] = {
        "comparison": config.name,
        "command": _command(config),
        "machine": machine(torch.device(config.device)),
        "tables": [dataclasses.asdict(table) for table in tables],
    }
    text = f"`{described['command']}`\n\n" + "\n".join(table.markdown() for table in tables)
    write_whole(config.out / "tables.json", (json.dumps(described, indent=1) + "\n").encode())
    write_whole(config.out / "tables.md", text.encode())
    return tables


def run_reproduce(config: ReproduceConfig, console: Console) -> None:
    with progress_bars(console, config.settings().steps) as started:
        tables = reproduce(config, started=started)
    for table in tables:
        console.print(table.terminal())
    console.print(f"tables: {config.out / 'tables.md'}", soft_wrap=True)


def _command(config: ReproduceConfig) -> str:
    """The command line that makes the same."""
    if called := called_as("reproduce"):
        return called
    words = ["manifold-tying", "reproduce", config.name]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "name" and value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return shlex.join(words)
