"""manifold-tying reproduce: the papers' comparisons at a chosen size."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import tyro
from rich.console import Console

from experiments import adaptation, pit, poet
from experiments.budgets import budgets, candidates, plan
from experiments.comparison import Table
from manifold_tying.huggingface import import_transformers
from manifold_tying.models import LlamaConfig, preset
from manifold_tying.training.ablation import MOST_SEEDS, budgets_of, check_folder
from manifold_tying.training.config import Settings, TrainConfig
from manifold_tying.training.files import write_atomic
from manifold_tying.training.hf_model import OUT
from manifold_tying.training.loop import train
from manifold_tying.training.machine import called_as, machine
from manifold_tying.training.progress import Started, progress_bars
from manifold_tying.training.recipes import resolve
from manifold_tying.training.run_data import load_data, run_data
from manifold_tying.training.rundir import RESULT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Recipe = Callable[[Path, Settings, int, Started | None], list[Table]]
RECIPES: Mapping[str, Recipe] = {
    "pit-from-scratch": pit.from_scratch,
    "pit-continued": pit.continued,
    "pit-adaptation": adaptation.adapted,
    "pit-ingredients": pit.ingredients,
    "pit-length": pit.length,
    "poet-pretraining": poet.pretraining,
    "poet-initialization": poet.initialization,
    "poet-merging": poet.merging,
    "poet-terms": poet.terms,
    "poet-budget": poet.budget,
}
BUDGETS = "pit-budgets"
NAMES = (*RECIPES, BUDGETS)
USUAL_TOKENS = 184_320
CONTINUED = ("pit-continued", "pit-adaptation")
OF_CONTINUED = {"init_from": None, "source_data": "stdlib", "source_tokens": 614_400}


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Run one of the papers' comparisons and write its tables, next to the paper's numbers, to OUT/tables.md.

    pit-from-scratch (PIT, Tables 4 and 5), pit-continued (Tables 1 and 2, Figure 3), pit-adaptation (Table 6);
    poet-pretraining (POET, Table 2), poet-initialization (Table 5), poet-merging (Table 6), poet-terms (Table 7 and Figure 10),
    poet-budget (Figure 5). Not in a paper: pit-budgets (PIT and the strongest plain tables from scratch at several numbers of
    tokens, each at its best of four trials), pit-length (PIT and plain tables over 1.8 M tokens) and pit-ingredients (a trained
    memory without each part of its recipe). A repeated command only trains missing runs.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(constructor=tyro.extras.literal_type_from_choices(NAMES))]
    """The comparison."""
    out: Path
    """Folder to write to."""
    preset: str = "nano"
    """Shape of the model."""
    tokens: int | str | None = None
    """Training tokens per run; for pit-budgets also a comma-separated list. None is 1,843,200 for pit-length, else 184,320."""
    arms: str | None = None
    """pit-budgets: comma-separated arms; None is all."""
    dry_run: bool = False
    """pit-budgets: only print how many runs are missing and how long they will take."""
    seeds: int = 3
    """Number of seeds: 0, 1, ..."""
    data: str | None = None
    """Corpus, as for train; None is docstrings for pit-continued and pit-adaptation, else stdlib."""
    batch_size: int = 8
    """Sequences per step; a source has train's."""
    sequence_length: int = 128
    """Tokens per sequence; a source has train's."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    init_from: Path | None = None
    """pit-continued, pit-adaptation: tied transformers checkpoint to continue; None trains a small one first."""
    source_data: str = "stdlib"
    """Without init_from: corpus of the source."""
    source_tokens: int = 614_400
    """Without init_from: training tokens of the source."""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"unknown comparison {self.name!r}; choose one of {', '.join(NAMES)}")
        for name in ("seeds", "source_tokens", *(("tokens",) if isinstance(self.tokens, int) else ())):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.seeds > MOST_SEEDS:
            raise ValueError(f"expected seeds <= {MOST_SEEDS}, got {self.seeds}")
        hidden_size = preset(self.preset).hidden_size
        if self.name != BUDGETS and (self.arms is not None or isinstance(self.tokens, str) or self.dry_run):
            raise ValueError(
                f"only {BUDGETS} takes arms, dry_run and several numbers of tokens; leave them out of {self.name}"
            )
        if unknown := [arm for arm in self.chosen or () if arm not in candidates(hidden_size)]:
            raise ValueError(f"unknown arms {', '.join(unknown)}; choose from {', '.join(candidates(hidden_size))}")
        if self.name not in CONTINUED and (given := [k for k, v in OF_CONTINUED.items() if getattr(self, k) != v]):
            raise ValueError(f"only {' and '.join(CONTINUED)} take {', '.join(given)}; leave them out of {self.name}")
        self.settings()

    @property
    def chosen(self) -> list[str] | None:
        """The chosen arms; None is all."""
        return None if self.arms is None else [arm.strip() for arm in self.arms.split(",")]

    @property
    def budgets(self) -> list[int]:
        """Training tokens per run; several for pit-budgets."""
        size = self.batch_size * self.sequence_length
        if isinstance(self.tokens, str):
            return budgets_of(self.tokens, size)
        usual = pit.LENGTH_TOKENS if self.name == "pit-length" else USUAL_TOKENS
        return [usual if self.tokens is None else self.tokens]

    def settings(self) -> Settings:
        """Settings of every run, except its source checkpoint and further budgets."""
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
    """Train the missing runs, return the tables, and write them to ``OUT/tables.md`` and ``OUT/tables.json``."""
    settings = config.settings()
    if config.name in CONTINUED:
        source = config.init_from
        if source is None:
            steps = max(1, round(config.source_tokens / Settings().tokens_per_step))
            shared = Settings(data=config.source_data, weight_decay=WEIGHT_DECAY, device=config.device)
            source = trained_source(config.out / "source", config.preset, shared, steps, started)
        settings = dataclasses.replace(settings, init_from=source, preset=Settings.preset)
    if config.name == BUDGETS:
        tables = budgets(config.out, settings, config.budgets, config.chosen, config.seeds, started)
    else:
        tables = RECIPES[config.name](config.out, settings, config.seeds, started)
    described: dict[str, Any] = {
        "comparison": config.name,
        "command": called_as("reproduce") or f"reproduce({config})",
        "machine": machine(torch.device(config.device)),
        "tables": [dataclasses.asdict(table) for table in tables],
    }
    text = f"`{described['command']}`\n\n" + "\n".join(table.markdown() for table in tables)
    write_atomic(config.out / "tables.json", (json.dumps(described, indent=1) + "\n").encode())
    write_atomic(config.out / "tables.md", text.encode())
    return tables


def run_reproduce(config: ReproduceConfig, console: Console) -> None:
    if config.dry_run:
        console.print(plan(config.out, config.settings(), config.budgets, config.chosen, config.seeds).terminal())
        return
    with progress_bars(console, config.settings().steps) as started:
        tables = reproduce(config, started=started)
    for table in tables:
        console.print(table.terminal())
    console.print(f"tables: {config.out / 'tables.md'}", soft_wrap=True)


LR, WIDTH = 4e-3, 128  # AdamW's peak rate at width 128, from scratch with transformers' initial weights
WEIGHT_DECAY = 0.1
# The last quarter of the steps runs at a tenth of the rate, until the loss stops falling.
SETTLING, SETTLING_RATE = 0.25, 0.1


def tied_llama(shape: LlamaConfig, positions: int, **options: Any) -> "PreTrainedModel":
    """transformers' Llama with the sizes of a preset and tied tables, initialized from torch's global generator."""
    transformers = import_transformers()
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=positions,
            rms_norm_eps=shape.norm_eps,
            tie_word_embeddings=True,
            **options,
        )
    )


def trained_source(out: Path, name: str, shared: Settings, steps: int, started: Started | None = None) -> Path:
    """Train a tied checkpoint of a preset, unless it exists, and return its folder; a folder of another one is refused.

    The last quarter of the steps is a second run that continues the first one. Its rate falls from a tenth of the peak to a
    hundredth, because published checkpoints were also trained to the end of their schedule.
    """
    start = out / f"start-{name}"
    lr = LR * WIDTH / preset(name).hidden_size
    if not (start / "tokenizer.json").exists():
        made = load_data(TrainConfig(out=start, settings=dataclasses.replace(shared, preset=name, steps=steps)))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made_up = tied_llama(preset(name), 4 * Settings.sequence_length, bos_token_id=0, eos_token_id=0)
            made_up.save_pretrained(start)
        shutil.copy2(made.directory / "tokenizer.json", start)  # last, because it marks the folder as complete
    settling = round(SETTLING * steps)
    first = dataclasses.replace(shared, init_from=start, steps=steps - settling, lr=lr)
    falling = _run(out / "run", first, 0, started)
    if not settling:
        return falling
    second = dataclasses.replace(shared, init_from=falling, steps=settling, lr=SETTLING_RATE * lr)
    return _run(out / "settled", second, 1, started)


def _run(out: Path, settings: Settings, seed: int, started: Started | None) -> Path:
    """Train one run, unless it exists, and return its checkpoint; ``seed`` sets the order of the data."""
    settings = dataclasses.replace(settings, checkpoint_every=-(-settings.steps // 4))
    config = resolve(TrainConfig(out=out, interface="transpose", seed=seed, resume=True, settings=settings))
    check_folder(config, run_data(load_data(config), config.settings, seed).identity)
    if not (out / RESULT).exists():
        train(config, observer=started("source", 0, 1, settings.steps) if started else None)
    return out / OUT
