"""Merge experiments, and decide whether their losses are comparable."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from manifold_tying.models import PRESETS
from manifold_tying.training.report.load import ABLATION, RUN, Experiment, arm_names, load_experiment

# Settings that must agree for losses to be comparable.
MEASURED_ON = ("data", "tokenizer", "vocabulary", "val_tokens", "sequence_length")
APART = "Not all losses here are measured on the same text and tokenization, so they cannot be compared across:"


def load_experiments(folders: Sequence[str | Path]) -> Experiment:
    """Load the folders as one experiment; with several, arms are called ``folder/arm``. ``ablate --tokens`` writes several."""
    if not folders:
        raise ValueError("expected at least one folder; give the --out of manifold-tying ablate or train")
    paths = [path for folder in folders for path in _budgets(Path(folder))]
    for place, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:place]]:
            raise ValueError(f"{path} is given twice; leave one out")
    loaded = [load_experiment(path) for path in paths]
    return loaded[0] if len(loaded) == 1 else merged(dict(zip(names_of(paths), loaded, strict=True)))


def _budgets(folder: Path) -> list[Path]:
    """The folder, or those of the budgets in it if it holds no results of its own."""
    if any((folder / name).exists() for name in (*ABLATION, *RUN)):
        return [folder]
    return sorted(folder.glob("tokens-*"), key=lambda budget: (len(budget.name), budget.name)) or [folder]


def names_of(folders: Sequence[Path]) -> list[str]:
    """The shortest suffixes of the paths that differ."""
    parts = [folder.resolve().parts for folder in folders]
    names = [of[-1] for of in parts]
    for count in range(2, max(map(len, parts)) + 1):
        longer = ["/".join(of[-count:]) for of in parts]
        names = [long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)]
    return names


def merged(experiments: Mapping[str, Experiment]) -> Experiment:
    named = experiments.items()
    arms = {f"{name}/{arm}": {**one.settings, **own} for name, one in named for arm, own in one.arms.items()}
    values = {key: [own.get(key) for own in arms.values()] for own in arms.values() for key in own}
    shared = {key: of[0] for key, of in values.items() if all(value == of[0] for value in of)}
    return Experiment(
        rows=[{**row, "arm": f"{name}/{row['arm']}"} for name, one in named for row in one.rows],
        runs=[replace(run, arm=f"{name}/{run.arm}") for name, one in named for run in one.runs],
        sources=[replace(source, name=name) for name, one in named for source in one.sources],
        settings={key: value for key, value in shared.items() if value is not None},
        arms={arm: {key: of for key, of in own.items() if key not in shared} for arm, own in arms.items()},
        failures=[f"{name}/{sentence}" for name, one in named for sentence in one.failures],
    )


def comparable(experiment: Experiment) -> list[list[str]]:
    """The finished arms, grouped so that losses within a group are measured alike, after as many tokens."""
    measured = _measured_on(experiment).loc[arm_names(experiment.rows)]
    measured["tokens"] = measured.index.map({row["arm"]: row["tokens"] for row in experiment.rows})
    return [list(of.index) for _, of in measured.groupby([*MEASURED_ON, "text", "tokens"], sort=False)]


def differences(experiment: Experiment) -> list[str]:
    """A sentence for each difference that makes losses incomparable."""
    measured = _measured_on(experiment)
    names = {key: key.replace("val_", "validation ").replace("_", " ") for key in MEASURED_ON}
    sentences = [_sentence(name, measured[key]) for key, name in names.items()]
    sentences += [_sentence("held-out text", of.text) for _, of in measured.groupby([*MEASURED_ON], sort=False)]
    return [sentence for sentence in sentences if sentence]


def _sentence(name: str, values: pd.Series) -> str:
    """The arms by value; "" if all are equal."""
    groups = values.groupby(values, sort=False)
    listed = "; ".join(f"{value} ({', '.join(of.index)})" for value, of in groups)
    return f"{name}: {listed}." if len(groups) > 1 else ""


def _measured_on(experiment: Experiment) -> pd.DataFrame:
    """One row per arm: the settings of ``MEASURED_ON`` and the ``text`` recorded by its runs."""
    table: dict[str, list[str | None]] = {}
    specs: dict[str, str | None] = {}
    for arm, own in experiment.arms.items():
        settings = {**experiment.settings, **own}
        start, shape = settings.get("init_from"), PRESETS.get(settings.get("preset", ""))
        size = settings.get("vocabulary") or (shape.vocab_size if shape else 0)
        named = {
            "tokenizer": settings.get("tokenizer") or (f"from {start}" if start else "trained on the corpus"),
            "vocabulary": "from the checkpoint" if start or not size else f"{size:,} tokens",
        }
        texts = [
            f"{row['evaluated_tokens']:,} tokens with hash {row['held_out_sha256'][:8]}"
            for row in experiment.rows
            if row["arm"] == arm
        ]
        table[arm] = [str(named.get(key) or settings.get(key, "unknown")) for key in MEASURED_ON]
        table[arm].append(text := " and ".join(dict.fromkeys(texts)) or None)
        if text is not None:  # one text, even if its path is spelled in two ways
            table[arm][0] = specs.setdefault(text, table[arm][0])
    return pd.DataFrame.from_dict(table, orient="index", columns=[*MEASURED_ON, "text"])
