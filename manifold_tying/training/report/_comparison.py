"""Several experiments as one, and whether their losses may be compared at all."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manifold_tying.models import PRESETS
from manifold_tying.training.report._load import Experiment, Row, arm_names, load_experiment

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
    groups = []
    for arms in _alike(experiment, arm_names(experiment.rows)):
        texts = _texts(experiment.rows, arms)
        if len({*texts.values()} - {None}) > 1:
            groups += [[arm for arm in arms if texts[arm] == text] for text in dict.fromkeys(texts.values())]
        else:  # what the first versions did not record is no difference
            groups.append(arms)
    return groups


def differences(experiment: Experiment) -> list[str]:
    """A sentence for each setting by which the losses are not measured on the same text, in the same tokens."""
    of_arms = {arm: _measured_on({**experiment.settings, **own}) for arm, own in experiment.arms.items()}
    sentences = []
    for key in MEASURED_ON:
        name = key.replace("val_", "validation ").replace("_", " ")
        sentences += _sentence(name, {arm: measured[key] for arm, measured in of_arms.items()})
    for arms in _alike(experiment, experiment.arms):
        texts = _texts(experiment.rows, arms)
        sentences += _sentence("held-out text", {arm: text for arm, text in texts.items() if text is not None})
    return sentences


def _sentence(name: str, values: Mapping[str, str]) -> list[str]:
    """The arms by their values; nothing where all have the same."""
    groups: dict[str, list[str]] = {}
    for arm, value in values.items():
        groups.setdefault(value, []).append(arm)
    listed = "; ".join(f"{value} ({', '.join(arms)})" for value, arms in groups.items())
    return [f"{name}: {listed}."] if len(groups) > 1 else []


def _alike(experiment: Experiment, arms: Iterable[str]) -> list[list[str]]:
    """The arms in groups of those whose settings ask for the same text in the same tokens."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for arm in arms:
        measured = _measured_on({**experiment.settings, **experiment.arms[arm]})
        groups.setdefault(tuple(measured.values()), []).append(arm)
    return list(groups.values())


def _texts(rows: Sequence[Row], arms: Sequence[str]) -> dict[str, str | None]:
    """What the runs of each arm were evaluated on, as they recorded it; None where they did not."""
    found: dict[str, dict[str, None]] = {arm: {} for arm in arms}
    for row in rows:
        if row["arm"] in found and "held_out_sha256" in row:
            found[row["arm"]][f"{row['evaluated_tokens']:,} tokens with hash {row['held_out_sha256'][:8]}"] = None
    return {arm: " and ".join(texts) or None for arm, texts in found.items()}


def _measured_on(settings: Mapping[str, Any]) -> dict[str, str]:
    start, shape = settings.get("init_from"), PRESETS.get(settings.get("preset", ""))
    tokenizer = settings.get("tokenizer") or (f"that of {start}" if start else "trained on the corpus")
    vocabulary = "that of the checkpoint" if start or shape is None else f"{shape.vocab_size:,} tokens"
    named = {"tokenizer": str(tokenizer), "vocabulary": vocabulary}
    return {key: named.get(key) or str(settings.get(key, "unknown")) for key in MEASURED_ON}
