"""One look per arm, the same in every figure and in the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's palette, told apart with the common forms of colour blindness; without its yellow, too pale for a line
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":")


@dataclass(frozen=True, slots=True)
class Look:
    """Colour and marker each tell seven arms apart; from the eighth on the line is dashed as well."""

    colour: str
    marker: str
    dashes: str

    @property
    def line(self) -> dict[str, Any]:
        """As matplotlib's plot takes it."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes}


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """A look for every arm, by its place in the experiment and so not by which arms a figure shows."""
    return {
        arm: Look(
            COLOURS[place % len(COLOURS)],
            MARKERS[place % len(MARKERS)],
            DASHES[place // len(COLOURS) % len(DASHES)],
        )
        for place, arm in enumerate(arms)
    }
