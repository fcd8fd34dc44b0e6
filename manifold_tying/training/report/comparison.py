"""Several experiments as one, and whether their losses may be compared at all."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from manifold_tying.models import PRESETS
from manifold_tying.training.report.load import Experiment, arm_names, load_experiment

# What a validation loss is measured on; everything else may well be what is compared.
MEASURED_ON = ("data", "tokenizer", "vocabulary", "val_tokens", "sequence_length")
APART = "Losses here are not all measured on the same text in the same tokens, so they cannot be compared across:"


def load_experiments(folders: Sequence[str | Path]) -> Experiment:
    """One experiment as it is; of several the arms are called ``folder/arm``."""
    if not folders:
        raise ValueError("expected at least one folder; give the --out of manifold-tying ablate or train")
    paths = [Path(folder) for folder in folders]
    for place, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:place]]:
            raise ValueError(f"{path} is given twice; leave one out")
    loaded = [load_experiment(path) for path in paths]
    return loaded[0] if len(loaded) == 1 else merged(dict(zip(names_of(paths), loaded, strict=True)))


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, and as many before it as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    names = [of[-1] for of in parts]
    for count in range(2, max(map(len, parts)) + 1):
        longer = ["/".join(of[-count:]) for of in parts]
        names = [long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)]
    return names


def merged(experiments: Mapping[str, Experiment]) -> Experiment:
    """The experiments in one, under the names of their folders."""
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
    """The arms that have finished runs, in groups within which losses are measured on the same."""
    groups, measured = [], _measured_on(experiment).loc[arm_names(experiment.rows)]
    for _, alike in measured.groupby([*MEASURED_ON], sort=False):
        if alike.text.nunique() > 1:
            groups += [list(of.index) for _, of in alike.groupby("text", sort=False, dropna=False)]
        else:  # what the first versions did not record is no difference
            groups.append(list(alike.index))
    return groups


def differences(experiment: Experiment) -> list[str]:
    """A sentence for each setting by which the losses are not measured on the same text, in the same tokens."""
    measured = _measured_on(experiment)
    names = {key: key.replace("val_", "validation ").replace("_", " ") for key in MEASURED_ON}
    sentences = [_sentence(name, measured[key]) for key, name in names.items()]
    sentences += [_sentence("held-out text", of.text) for _, of in measured.groupby([*MEASURED_ON], sort=False)]
    return [sentence for sentence in sentences if sentence]


def _sentence(name: str, values: pd.Series) -> str:
    """The arms by their values; "" where all have the same."""
    groups = values.groupby(values, sort=False)
    listed = "; ".join(f"{value} ({', '.join(of.index)})" for value, of in groups)
    return f"{name}: {listed}." if len(groups) > 1 else ""


def _measured_on(experiment: Experiment) -> pd.DataFrame:
    """A line per arm: ``MEASURED_ON`` by its settings, and the ``text`` that its runs recorded, if they did."""
    table: dict[str, list[str | None]] = {}
    for arm, own in experiment.arms.items():
        settings = {**experiment.settings, **own}
        start, shape = settings.get("init_from"), PRESETS.get(settings.get("preset", ""))
        named = {
            "tokenizer": settings.get("tokenizer") or (f"that of {start}" if start else "trained on the corpus"),
            "vocabulary": "that of the checkpoint" if start or shape is None else f"{shape.vocab_size:,} tokens",
        }
        texts = [
            f"{row['evaluated_tokens']:,} tokens with hash {row['held_out_sha256'][:8]}"
            for row in experiment.rows
            if row["arm"] == arm and "held_out_sha256" in row
        ]
        table[arm] = [str(named.get(key) or settings.get(key, "unknown")) for key in MEASURED_ON]
        table[arm].append(" and ".join(dict.fromkeys(texts)) or None)
    return pd.DataFrame.from_dict(table, orient="index", columns=[*MEASURED_ON, "text"])
