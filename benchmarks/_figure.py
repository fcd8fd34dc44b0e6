"""Reproducible figures for the docs: equal numbers give equal files."""

from pathlib import Path
from typing import Any


def pyplot(salt: str) -> Any:
    """matplotlib.pyplot for SVG files whose identifiers depend only on the salt."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = salt
    from matplotlib import pyplot as plt

    return plt


def save(plt: Any, figure: Any, path: Path) -> None:
    """Write the figure without a date and close it."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
