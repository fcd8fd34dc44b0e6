"""Statistics over seeds, and numbers as text with true minus signs and superscript powers of ten."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

mean = statistics.fmean  # ValueError for no values
DASH = "—"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
TWO_SEEDS = 9.0  # standard deviations at which a t-test of two values reaches 5 %: 12.7 / √2


@dataclass(frozen=True, slots=True)
class Summary:
    """One quantity over n seeds; ``sd`` is the sample standard deviation, None for a single seed."""

    mean: float
    sd: float | None
    n: int

    @property
    def beyond_spread(self) -> bool:
        """Whether |mean| exceeds the standard deviation, with two seeds nine times. A reading aid, not a significance test."""
        return self.sd is not None and abs(self.mean) > self.sd * (TWO_SEEDS if self.n == 2 else 1)


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean, sample standard deviation and count; None for no values."""
    if not values:
        return None
    with np.errstate(invalid="ignore"):  # a diverged run: inf - inf
        return Summary(mean(values), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def paired_differences(values: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """values - baseline for every seed that both have, in seed order.

    Two arms with the same seed share data order and initial body; both cancel in the difference.
    """
    return [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]


def fixed(value: float, decimals: int = 0, *, signed: bool = False) -> str:
    """Thousands separated, a fixed number of decimals: 1,234.50, −0.0120; with ``signed`` also +0.0120."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    rounded = round(value, decimals) + 0.0  # adding 0.0 turns a negative zero into a plain one
    return f"{rounded:{'+' if signed else ''},.{max(decimals, 0)}f}".replace("-", "−")


def significant(value: float, digits: int = 3, *, like: float | None = None) -> str:
    """Significant digits: 1.23, 45.6, and 2.1×10⁻⁷ below 0.01 and from 100,000 on. With ``like``, rounded at the last digit
    of that number, so that a spread aligns with its mean."""
    of = value if like is None or abs(value) > abs(like) else like
    if not (math.isfinite(value) and math.isfinite(of)):
        return fixed(value)
    power = int(f"{of:.{digits - 1}e}".split("e")[1])  # after rounding: 9.99 to two digits is 10
    if -2 <= power < 5:
        return fixed(value, max(digits - 1 - power, 0))
    return f"{fixed(value / 10.0**power, digits - 1)}×10{str(power).translate(SUPERSCRIPTS)}"


def decimals_of(spread: float | None, *, least: int = 2, most: int = 4) -> int:
    """Decimals of a mean with this spread: one digit of the spread, two if the first is a 1; ``most`` without a spread."""
    if not spread or not math.isfinite(spread):
        return most
    lead, power = f"{spread:.1e}".split("e")
    return min(max(-int(power) + lead.startswith("1"), least), most)


def interval(summary: Summary, *, signed: bool = False) -> tuple[str, str]:
    """Mean and spread, rounded by the spread: 4.84 and 0.07; "—" is the spread of one seed."""
    decimals = decimals_of(summary.sd)
    return fixed(summary.mean, decimals, signed=signed), DASH if summary.sd is None else fixed(summary.sd, decimals)


def perplexity(loss: Summary) -> str:
    """exp of the mean loss, rounded by its spread."""
    value = math.inf if loss.mean >= 700 else math.exp(loss.mean)
    return fixed(value, decimals_of(value * (loss.sd or 0.005), least=-300, most=1))
