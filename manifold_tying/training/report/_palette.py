"""One look per arm, the same in every figure and in the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's palette, told apart with the common forms of colour blindness; without its yellow, too pale for a line
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
# The same hues on a dark page, each in a contrast of at least 6 with it
ON_DARK = ("#4A9FE3", "#F27B35", "#2DBF93", "#E295C1", "#F0B840", "#9AD6F7", "#B4BBC5")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":")
SVG_DASHES = {"-": "none", "--": "5 2.5", ":": "1.5 2"}


@dataclass(frozen=True, slots=True)
class Look:
    """Colour and marker each tell seven arms apart; from the eighth on the line is dashed as well."""

    place: int

    @property
    def colour(self) -> str:
        """As it is on white."""
        return COLOURS[self.place % len(COLOURS)]

    @property
    def variable(self) -> str:
        """The page's name for the colour, which is another on a dark page."""
        return f"var({_name(self.place % len(COLOURS))})"

    @property
    def marker(self) -> str:
        return MARKERS[self.place % len(MARKERS)]

    @property
    def dashes(self) -> str:
        return DASHES[self.place // len(COLOURS) % len(DASHES)]

    @property
    def group(self) -> str:
        """What everything drawn for the arm is marked with, so that it can be hidden."""
        return f"arm-{self.place}"

    @property
    def line(self) -> dict[str, Any]:
        """As matplotlib's plot takes it."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes, "gid": self.group}

    @property
    def band(self) -> dict[str, Any]:
        """As matplotlib's fill_between takes it."""
        return {"color": self.colour, "alpha": 0.18, "linewidth": 0, "gid": self.group}


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """A look for every arm, by its place in the experiment and so not by which arms a figure shows."""
    return {arm: Look(place) for place, arm in enumerate(arms)}


def variables(colours: Sequence[str]) -> str:
    """The colours as declarations of the page's style."""
    return " ".join(f"{_name(place)}: {colour};" for place, colour in enumerate(colours))


def _name(place: int) -> str:
    return f"--arm-{place}"
