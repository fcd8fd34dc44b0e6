"""The findings in plain sentences, computed from the rows: which arm is best, and frozen against trainable memory."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._experiment import Row, arm_names, by_seed
from ._numbers import fixed
from ._reading import checked_rows
from ._statistics import Summary, beyond_spread, mean, paired_differences, summarize

FROZEN, TRAINABLE = "pit-frozen", "pit-trainable"


def findings(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The objects of summary.json in sentences; only what exceeds the spread between seeds is called a difference."""
    checked = checked_rows(rows, where="rows")
    losses = {arm: by_seed(checked, arm, "val_loss") for arm in arm_names(checked)}
    finite = {arm: loss for arm, loss in losses.items() if all(map(math.isfinite, loss.values()))}
    diverged = [arm for arm in losses if arm not in finite]
    sentences = [_best(finite)] if finite else []
    if diverged:
        sentences.append(
            f"Without a finite validation loss at the end, so left out of the comparison: {_list(diverged)}."
        )
    if FROZEN in finite and TRAINABLE in finite:
        sentences.append(_memory(finite[FROZEN], finite[TRAINABLE]) + _speed(checked))
    elif FROZEN in losses or TRAINABLE in losses:
        sentences.append(
            f"Frozen against trainable memory: no answer, since that takes both {FROZEN} and {TRAINABLE}, each with a "
            "finite validation loss."
        )
    return sentences


def _best(losses: dict[str, dict[int, float]]) -> str:
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


def _memory(frozen: dict[int, float], trainable: dict[int, float]) -> str:
    differences = paired_differences(trainable, frozen)
    difference = summarize(differences)
    if difference is None:
        return "Frozen against trainable memory: the two share no seed, so there is no fair comparison."
    side, count = (
        ("below", sum(d < 0 for d in differences))
        if difference.mean < 0
        else ("above", sum(d > 0 for d in differences))
    )
    size = _interval(Summary(abs(difference.mean), difference.sd, difference.n))
    text = f"Frozen against trainable memory: the trainable memory ends {size} nats {side} the frozen one"
    if beyond_spread(difference):
        return f"{text}, in {count} of {_seeds(difference.n)} and by more than the spread between seeds."
    return f"{text}. {_doubt(difference)}"


def _speed(rows: Sequence[Row]) -> str:
    frozen, trainable = (mean(list(by_seed(rows, arm, "tokens_per_second").values())) for arm in (FROZEN, TRAINABLE))
    if not (frozen > 0 and trainable > 0):
        return ""
    return f" The trainable memory trained at {trainable / frozen:.2f} times the frozen one's tokens per second."


def _doubt(difference: Summary) -> str:
    if difference.sd is None:
        return "With one seed nothing is known about the spread, so this may be chance."
    return "That is within the spread between seeds: this experiment does not tell the two apart."


def _interval(summary: Summary | None) -> str:
    assert summary is not None  # every arm has at least one seed
    return fixed(summary.mean, 4) + ("" if summary.sd is None else f" ± {fixed(summary.sd, 4)}")


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
