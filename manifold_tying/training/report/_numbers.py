"""Numbers as text, the same in the table, the page and the figures: true minus signs, ten to a superscript power."""

import math

DASH = "—"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def fixed(value: float, decimals: int = 0, *, signed: bool = False) -> str:
    """Thousands separated, a fixed number of decimals: 1,234.50, −0.0120; with ``signed`` also +0.0120."""
    if not math.isfinite(value):
        return _special(value)
    rounded = round(value, decimals) + 0.0  # adding 0.0 turns a negative zero into a plain one
    return f"{rounded:{'+' if signed else ''},.{decimals}f}".replace("-", "−")


def significant(value: float, digits: int = 3, *, like: float | None = None) -> str:
    """So many significant digits: 1.23, 45.6, and 2.1×10⁻⁷ below 0.01 and from 100,000 on.

    With ``like``, rounded at the place where that number is, so that a spread can stand below its mean, if it is smaller.
    """
    of = value if like is None or abs(value) > abs(like) else like
    if not (math.isfinite(value) and math.isfinite(of)):
        return _special(value)
    power = int(f"{of:.{digits - 1}e}".split("e")[1])  # after rounding: 9.99 to two digits is 10
    if -2 <= power < 5:
        return fixed(value, max(digits - 1 - power, 0))
    return f"{fixed(value / 10.0**power, digits - 1)}×10{str(power).translate(SUPERSCRIPTS)}"


def scale(maximum: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """The largest of the ascending (size, unit) that the maximum reaches, or the smallest."""
    reached = [unit for unit in units if maximum >= unit[0]]
    return reached[-1] if reached else units[0]


MEMORY_UNITS = ((2.0**20, "MiB"), (2.0**30, "GiB"))
COUNT_UNITS = ((1e3, "thousand"), (1e6, "million"))


def _special(value: float) -> str:
    return "nan" if math.isnan(value) else ("∞" if value > 0 else "−∞")
