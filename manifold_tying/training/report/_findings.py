"""The findings in plain sentences, computed from the rows: which arm is best, and frozen against trainable memory."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from manifold_tying.training.report._experiment import Row, arm_names, by_seed, interface_of
from manifold_tying.training.report._numbers import fixed
from manifold_tying.training.report._reading import checked_rows, failures
from manifold_tying.training.report._statistics import (
    FEWEST,
    Summary,
    beyond_spread,
    mean,
    paired_differences,
    summarize,
)

FROZEN, TRAINABLE = "pit-frozen", "pit-trainable"
Losses = Mapping[str, Mapping[int, float]]  # by arm and seed


def findings(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The objects of summary.json in sentences; only what exceeds the spread between seeds is called a difference."""
    rows = list(rows)
    checked = checked_rows(rows, where="rows")
    losses = {arm: by_seed(checked, arm, "val_loss") for arm in arm_names(checked)}
    finite = {arm: loss for arm, loss in losses.items() if all(map(math.isfinite, loss.values()))}
    diverged = [arm for arm in losses if arm not in finite]
    sentences = [_best(finite)] if finite else []
    if diverged:
        sentences.append(
            f"Without a finite validation loss at the end, so left out of the comparison: {_list(diverged)}."
        )
    frozen, trainable = _variants(FROZEN, finite), _variants(TRAINABLE, finite)
    if frozen and trainable:
        sentences.append(_memory(finite, frozen, trainable))
    elif any(interface_of(arm) in (FROZEN, TRAINABLE) for arm in losses):
        sentences.append(
            f"Frozen against trainable memory: no answer, since that takes both {FROZEN} and {TRAINABLE}, each with a "
            "finite validation loss."
        )
    return sentences + failures(rows)


def findings_by_group(rows: Sequence[Row], groups: Sequence[Sequence[str]]) -> list[str]:
    """:func:`findings` within each group of arms."""
    return [
        sentence for arms in groups if (of := [row for row in rows if row["arm"] in arms]) for sentence in findings(of)
    ]


def _best(losses: Losses) -> str:
    """Arms are ranked over the seeds that all of them have: a mean over lucky seeds is no merit of the arm."""
    shared = set.intersection(*(set(loss) for loss in losses.values()))
    over = {arm: [loss[seed] for seed in sorted(shared or loss)] for arm, loss in losses.items()}
    ranking = sorted(over, key=lambda arm: mean(over[arm]))
    best = ranking[0]
    lowest = f"{_interval(summarize(over[best]))} nats per token over {_seeds(len(over[best]))}"
    if len(ranking) == 1:
        return f"{best}: validation loss {lowest}. There is no other arm to compare it with."
    second = ranking[1]
    difference = summarize(paired_differences(losses[second], losses[best]))
    if difference is None or not shared:
        return (
            f"{best} has the lowest mean validation loss, {lowest}, but not all arms share a seed to compare them by."
        )
    ahead = sum(loss > 0 for loss in paired_differences(losses[second], losses[best]))
    gap = f"{_interval(difference)} nats"
    if beyond_spread(difference):
        return (
            f"{best} ends with the lowest validation loss, {lowest}. That is {gap} below {second}, the next best; "
            f"it is ahead in {ahead} of {_seeds(difference.n)} and by more than the spread between seeds."
        )
    return f"{best} has the lowest mean validation loss, {lowest}, {gap} below {second}, the next best. " + _doubt(
        difference
    )


def _variants(interface: str, losses: Losses) -> list[str]:
    """The arms of an interface, the one with the lowest mean loss first."""
    arms = [arm for arm in losses if interface_of(arm) == interface]
    return sorted(arms, key=lambda arm: mean(list(losses[arm].values())))


def _memory(losses: Losses, frozen: Sequence[str], trainable: Sequence[str]) -> str:
    """The best arm with a frozen memory against the best one with a trainable memory."""
    differences = paired_differences(losses[trainable[0]], losses[frozen[0]])
    difference = summarize(differences)
    if difference is None:
        return "Frozen against trainable memory: the two share no seed, so there is no fair comparison."
    below = difference.mean < 0
    agreeing = sum((one < 0) == below for one in differences if one != 0)
    size = _interval(Summary(abs(difference.mean), difference.sd, difference.n))
    ends = f"ends {size} nats {'below' if below else 'above'}"
    text = f"Frozen against trainable memory: {_named(trainable)} {ends} {_named(frozen)}"
    if beyond_spread(difference):
        text += f", in {agreeing} of {_seeds(difference.n)} and by more than the spread between seeds."
    else:
        text += f". {_doubt(difference)}"
    return text


def _named(variants: Sequence[str]) -> str:
    return variants[0] if len(variants) == 1 else f"{variants[0]} (the best of {len(variants)})"


def _doubt(difference: Summary) -> str:
    if difference.n < FEWEST:
        return f"With {_seeds(difference.n)} little is known about the spread, so this may be chance."
    return "That is within the spread between seeds: this experiment does not tell the two apart."


def _interval(summary: Summary | None) -> str:
    assert summary is not None  # every arm has at least one seed
    return fixed(summary.mean, 4) + ("" if summary.sd is None else f" ± {fixed(summary.sd, 4)}")


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
