"""A made-up experiment of `ablate`, and what a page says about one."""

import json
import math
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from manifold_tying.training.arms import run_folder

ARMS = ("untied", "transpose", "pit-frozen", "pit-trainable")
FINAL = {"untied": 4.22, "transpose": 4.16, "pit-frozen": 4.19, "pit-trainable": 4.10}
TEXT = {"evaluated_tokens": 128, "held_out_sha256": "4f10f6b4"}
OTHER_TEXT = {"evaluated_tokens": 128, "held_out_sha256": "9c2e71d0"}
NO_ROTATIONS = {"orthogonality_error": None}
VOID = {"meta", "img", "br", "input"}


def write_experiment(
    out: Path, arms: Iterable[str] = ARMS, seeds: Iterable[int] = (0, 1), text: dict[str, Any] = TEXT
) -> list[dict]:
    """A made-up experiment in the format of `ablate`. Returns its rows."""
    rows = []
    for arm in arms:
        for seed in seeds:
            noise = np.random.default_rng([seed, len(arm)])
            pit = arm.startswith("pit")
            pace, end = 0.2 + 0.01 * len(arm), FINAL.get(arm, 4.3) + 0.01 * seed
            metrics: list[dict[str, Any]] = []
            for step in range(1, 81):
                loss = end + 6 * math.exp(-step / 12)
                line: dict[str, Any] = {"step": step, "tokens": 512 * step, "lr": 3e-3, "grad_norm": 1.0}
                line["loss"] = loss + noise.normal() / 20
                if step % 10 == 0:
                    line["val_loss"] = loss + noise.normal() / 200
                    line["defect"] = 1e-7 * (1 + noise.random()) if pit else None
                    line["delta_ti"] = 1e-7 * step * len(arm) if pit else 20.0 + step + len(arm)
                    line["cond_transform"] = 1 + step / 80 * (1 + noise.random()) if pit else None
                metrics.append(line)
            last = metrics[-1]
            folder = run_folder(out, arm, seed)
            folder.mkdir(parents=True)
            write_lines(folder / "metrics.jsonl", metrics)
            write_lines(folder / "timing.jsonl", [{"step": m["step"], "seconds": pace * m["step"]} for m in metrics])
            write_lines(folder / "probes.jsonl", [])
            row = {name: last[name] for name in ("val_loss", "tokens", "defect", "delta_ti", "cond_transform")}
            row |= {"arm": arm, "seed": seed, "train_loss": last["loss"], "seconds": pace * 80}
            row |= {"tokens_per_second": 512 / pace + seed, "peak_memory_bytes": 2**30 + 2**27 * seed}
            rows.append(row | NO_ROTATIONS | text | {"trainable_parameters": 3_300_000 + 2_100_000 * (arm == "untied")})
    own = {"embedding_norm": True, "lr": 0.003, "tokenizer": None}
    described = {
        "command": "manifold-tying ablate --preset nano --out runs/x",
        "machine": {"processor": "abacus", "cores": 2, "torch": "2.13", "python": "3.11", "device": "cpu"},
        "settings": {"preset": "nano", "steps": 80, "batch_size": 4},
        "arms": {arm: {**own, "memory_lr": 0.001234567 if arm == ARMS[-1] else None} for arm in arms},
    }
    (out / "summary.json").write_text(json.dumps(rows))
    (out / "experiment.json").write_text(json.dumps(described))
    return rows


def write_lines(path: Path, objects: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


class Page(HTMLParser):
    """What a browser would make of the page; fails on tags that do not nest."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.scripts: list[tuple[dict[str, str], str]] = []  # attributes and text
        self.figures: list[dict[str, str]] = []
        self.tables: list[list[list[list[str]]]] = []  # tables, rows, cells, pieces of text
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if self.tags[-1][1].get("class") == "plot":
            self.figures.append(self.tags[-1][1])
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]} at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts.append((self.tags[-1][1], data))
        elif not {"style", "svg"} & set(self.open):
            self.text.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1].append(data)

    def data(self) -> list[dict[str, Any]]:
        """What plotly is given, a figure after the other."""
        found = [json.loads(text) for attributes, text in self.scripts if attributes.get("type") == "application/json"]
        return found[: len(self.figures)]

    def download(self, name: str) -> str:
        """The file behind a link."""
        (link,) = [attributes["href"] for _, attributes in self.tags if attributes.get("download") == name]
        return unquote(link.partition(",")[2])


def with_losses(losses: dict[str, list[float]]) -> list[dict]:
    """Rows with given validation losses, one seed after the other; speed is 100 tokens per second and arm."""
    names = "train_loss", "tokens", "seconds", "peak_memory_bytes", "delta_ti", "cond_transform", "trainable_parameters"
    rest: dict[str, Any] = dict.fromkeys(names, 1.0) | {"defect": None} | NO_ROTATIONS | TEXT
    return [
        {"arm": arm, "seed": seed, "val_loss": loss, "tokens_per_second": 100.0 * position} | rest
        for position, (arm, values) in enumerate(losses.items(), start=1)
        for seed, loss in enumerate(values)
    ]
