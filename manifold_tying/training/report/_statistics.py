"""Mean, sample standard deviation and differences paired by seed: all the statistics that the report does."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FEWEST = 3  # seeds that say something about the spread between them


@dataclass(frozen=True, slots=True)
class Summary:
    """One quantity over n seeds; ``sd`` is None where one seed says nothing about the spread."""

    mean: float
    sd: float | None
    n: int


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; ValueError for no values."""
    if not values:
        raise ValueError("the mean of no values is undefined")
    return sum(values) / len(values)


def sample_sd(values: Sequence[float]) -> float | None:
    """sqrt(Σ(x - mean)² / (n - 1)), the standard deviation of a sample; None for fewer than two values."""
    if len(values) < 2:
        return None
    center = mean(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean, sample standard deviation and count; None for no values."""
    return Summary(mean(values), sample_sd(values), len(values)) if values else None


def paired_differences(values: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """values - baseline for every seed that both have, in the order of the seeds.

    Two arms with the same seed share the data order and the initial body, so what they share cancels in the difference.
    """
    return [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]


def beyond_spread(difference: Summary) -> bool:
    """Whether |mean| exceeds the standard deviation of the differences. A reading aid, not a significance test."""
    return difference.n >= FEWEST and difference.sd is not None and abs(difference.mean) > difference.sd
