"""The findings as sentences: the best arm, frozen against trainable memory, lost interfaces."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from manifold_tying.training.evaluate import health_warnings
from manifold_tying.training.numbers import Summary, interval, mean, paired_differences, perplexity, summarize
from manifold_tying.training.report.load import Experiment, arm_names, by_seed, checked_rows, failures, interface_of

FROZEN, TRAINABLE = "pit-frozen", "pit-trainable"
Losses = Mapping[str, Mapping[int, float]]  # by arm and seed


def findings(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Findings as sentences; a difference counts only if it exceeds the spread between seeds."""
    rows = list(rows)
    checked = checked_rows(rows, where="rows")
    losses = {arm: by_seed(checked, arm, "val_loss") for arm in arm_names(checked)}
    finite = {arm: loss for arm, loss in losses.items() if all(map(math.isfinite, loss.values()))}
    sentences = [_best(finite)] if finite else []
    if diverged := [arm for arm in losses if arm not in finite]:
        listed = ", ".join(diverged)
        sentences.append(f"The final validation loss is not finite, so left out of the comparison: {listed}.")
    frozen, trainable = _variants(FROZEN, finite), _variants(TRAINABLE, finite)
    if frozen and trainable:
        sentences.append(_memory(finite, frozen, trainable))
    elif any(interface_of(arm) in (FROZEN, TRAINABLE) for arm in losses):
        sentences.append(
            f"Frozen against trainable memory: no answer, since that needs both {FROZEN} and {TRAINABLE}, each with a finite "
            "validation loss."
        )
    return sentences + failures(rows)


def all_findings(experiment: Experiment, groups: Sequence[Sequence[str]]) -> list[str]:
    """:func:`findings` within each group of comparable arms, then lost interfaces and failed runs."""
    found = [[row for row in experiment.rows if row["arm"] in arms] for arms in groups]
    sentences = [sentence for rows in found if rows for sentence in findings(rows)]
    return [*sentences, *health(experiment), *experiment.failures]


def health(experiment: Experiment) -> list[str]:
    """A sentence for each metric of a run's PIT interface that left its limits at an evaluation."""
    sentences = []
    for run in experiment.runs:
        worst = {name: run.metrics[name].max() for name in ("cond_transform", "delta_ti")}
        found = health_warnings({name: value for name, value in worst.items() if not math.isnan(value)}).values()
        sentences += [f"{run.arm}, seed {run.seed}, at its worst evaluation: {text}." for text in found]
    return sentences


def _best(losses: Losses) -> str:
    """Rank the arms over the seeds that they share."""
    shared = set.intersection(*(set(loss) for loss in losses.values()))
    over = {arm: [loss[seed] for seed in sorted(shared or loss)] for arm, loss in losses.items()}
    best, *others = sorted(over, key=lambda arm: mean(over[arm]))
    loss = summarize(over[best])
    assert loss is not None  # every arm has at least one seed
    lowest = f"{_interval(loss)} nats per token (perplexity {perplexity(loss)}) over {_seeds(loss.n)}"
    if not others:
        return f"{best}: validation loss {lowest}. There is no other arm to compare it with."
    ahead = [losses[others[0]][seed] - losses[best][seed] for seed in sorted(shared)]
    if (difference := summarize(ahead)) is None:
        return f"{best} has the lowest mean validation loss, {lowest}, but not all arms share a seed for a fair comparison."
    gap = f"{_interval(difference)} nats"
    if difference.beyond_spread:
        return (
            f"{best} ends with the lowest validation loss, {lowest}. That is {gap} below {others[0]}, the next best; it is "
            f"ahead in {sum(loss > 0 for loss in ahead)} of {_seeds(difference.n)} and by more than the spread between seeds."
        )
    return f"{best} has the lowest mean validation loss, {lowest}, {gap} below {others[0]}, the next best. {_doubt(difference)}"


def _variants(interface: str, losses: Losses) -> list[str]:
    """The arms of an interface, by mean loss."""
    arms = [arm for arm in losses if interface_of(arm) == interface]
    return sorted(arms, key=lambda arm: mean(list(losses[arm].values())))


def _memory(losses: Losses, frozen: Sequence[str], trainable: Sequence[str]) -> str:
    """Compare the best arm with a frozen memory to the best one with a trainable memory."""
    differences = paired_differences(losses[trainable[0]], losses[frozen[0]])
    difference = summarize(differences)
    if difference is None:
        return "Frozen against trainable memory: the two share no seed, so there is no fair comparison."
    sign = -1 if difference.mean < 0 else 1
    size = _interval(replace(difference, mean=sign * difference.mean))
    ends = f"{_named(trainable)} ends {size} nats {'below' if sign < 0 else 'above'} {_named(frozen)}"
    if not difference.beyond_spread:
        return f"Frozen against trainable memory: {ends}. {_doubt(difference)}"
    agreeing = f"{sum(sign * one > 0 for one in differences)} of {_seeds(difference.n)}"
    return f"Frozen against trainable memory: {ends}, in {agreeing} and by more than the spread between seeds."


def _named(variants: Sequence[str]) -> str:
    return variants[0] if len(variants) == 1 else f"{variants[0]} (the best of {len(variants)})"


def _doubt(difference: Summary) -> str:
    if difference.n < 3:
        return f"With {_seeds(difference.n)} little is known about the spread, so this may be chance."
    return "That is within the spread between seeds: this experiment does not tell the two apart."


def _interval(summary: Summary) -> str:
    middle, spread = interval(summary)
    return middle if summary.sd is None else f"{middle} ± {spread}"


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"
