"""Reproducible figures for the docs: equal numbers give equal files. The chart of a hot path."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._summary import place

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # one for each machine and dtype
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
LARGEST = 25.0  # larger ratios are drawn here


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


def chart(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each contender's time over the reference's, for rows with the most common reference."""
    plt = pyplot(path.stem)
    rows = [(place(result), row) for result in results for row in result["rows"]]
    ((reference, _),) = Counter(row["reference"] for _, row in rows).most_common(1)
    dots = [
        (found, name, min(values["ratio"], LARGEST))
        for found, row in rows
        for name, values in row["contenders"].items()
        if values.get("ratio") and reference == row["reference"] != name
    ]
    names, places = (list(dict.fromkeys(dot[i] for dot in dots)) for i in (1, 0))
    figure, axes = plt.subplots(figsize=(8, 1.1 + 0.28 * len(names)))
    for number, found in enumerate(places):
        shift = 0.16 * (number - (len(places) - 1) / 2)
        x = [ratio for of, _, ratio in dots if of == found]
        y = [names.index(name) + shift for of, name, _ in dots if of == found]
        axes.scatter(x, y, s=22, alpha=0.7, color=COLOURS[number], label=", ".join(found))
    axes.axvline(1, color="#57606a", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlim(min(0.4, *(ratio for *_, ratio in dots), 1) * 0.9, LARGEST * 1.1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(f"time over {reference}'s; left of 1 is faster, {LARGEST:g} stands for more")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=len(places), fontsize=8, frameon=False)
    save(plt, figure, path)
