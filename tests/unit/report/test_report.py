"""The end of an ablation on made-up experiments: every number against numpy, every name escaped."""

import base64
import gzip
import hashlib
import html
import io
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hostile import tree
from made_up import ARMS, Page, with_losses, write_experiment, write_lines
from rich.console import Console

from manifold_tying.training.numbers import decimals_of, paired_differences, perplexity, significant, summarize
from manifold_tying.training.report import (
    Experiment,
    Run,
    findings,
    load_experiment,
    load_experiments,
    summary_table,
    write_report,
)
from manifold_tying.training.report.figures import FIGURES, MOST, curve, drawn
from manifold_tying.training.report.render import MARK


def reported_page(out: Path) -> Page:
    return Page(write_report(load_experiment(out), out))


def number(text: str) -> float:
    """Back from how numbers are written on the page."""
    powers = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    plain = text.replace("−", "-").replace(",", "").replace("±", "").strip()
    mantissa, _, power = plain.partition("×10")
    return float(mantissa) * 10.0 ** int(power.translate(powers) or 0)


def assert_shown(cell: list[str], values: np.ndarray) -> None:
    """Mean and standard deviation, up to half of the last digit and a little for floating point."""
    for text, expected in zip(cell, (values.mean(), values.std(ddof=1)), strict=True):
        mantissa, _, power = text.partition("×10")
        unit = number(f"1×10{power}") if power else 1.0
        assert number(text) == pytest.approx(expected, abs=0.51 * unit * 10.0 ** -len(mantissa.partition(".")[2]))


def of(rows: list[dict], arm: str, key: str) -> np.ndarray:
    return np.array([row[key] for row in rows if row["arm"] == arm], dtype=float)


def printed(rows: list[dict], width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(summary_table(rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


Reported = tuple[Page, list[dict], Path]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    out = tmp_path_factory.mktemp("experiment")
    rows = write_experiment(out)
    return reported_page(out), rows, out


# statistics


def test_differences_are_paired_by_seed_and_not_by_position() -> None:
    assert paired_differences({3: 1.0, 1: 5.0, 7: 9.0}, {1: 4.0, 3: 3.0, 2: 0.0}) == [1.0, -2.0]


def test_numbers_as_text() -> None:
    texts = {-45.678: "−45.7", 2.149e-7: "2.15×10⁻⁷", 0.0: "0.00", 9.999: "10.0", 12345.6: "12,346", math.inf: "∞"}
    assert {value: significant(value) for value in texts} == texts
    # digits that fit the spread
    spreads = {None: 4, 0.0: 4, math.nan: 4, 1e-9: 4, 0.07: 2, 0.14: 2, 0.014: 3, 0.0096: 3, 0.3: 2, 12.0: 2}
    assert {spread: decimals_of(spread) for spread in spreads} == spreads
    perplexities = {(4.0, 4.2): "60", (4.0,): "54.6", (9.0, 9.2): "9,000", (math.inf, 1.0): "∞", (math.nan,): "nan"}
    for losses, expected in perplexities.items():
        summary = summarize(losses)
        assert summary is not None and perplexity(summary) == expected
    # a spread is rounded at the place of its mean
    assert significant(3e-9, 2, like=2e-7) == "0.0×10⁻⁷"
    assert significant(0.3, 3, like=44.4) == "0.3"
    assert significant(1.289e6, 3, like=9.12e5) == "1.29×10⁶"


# the page


def test_results_in_the_page_are_those_of_numpy(reported: Reported) -> None:
    page, rows, _ = reported
    table = page.tables[0]
    heading = ["".join(cell) for cell in table[0]]
    columns = {
        "val loss nats": ("val_loss", 1), "train loss nats": ("train_loss", 1), "speed tokens/s": ("tokens_per_second", 1),
        "peak memory GiB": ("peak_memory_bytes", 2**30), "defect": ("defect", 1), "cond(T)": ("cond_transform", 1),
        "ΔTI": ("delta_ti", 1),
    }  # fmt: skip
    assert [row[0] for row in table[1:]] == [[arm] for arm in ARMS]
    for arm, row in zip(ARMS, table[1:], strict=True):
        cells = dict(zip(heading, row, strict=True))
        assert cells["seeds"] == ["2"]
        for name, (key, unit) in columns.items():
            if not arm.startswith("pit") and name in ("defect", "cond(T)"):
                assert cells[name] == ["—"]
                continue
            assert_shown(cells[name], of(rows, arm, key) / unit)
        losses = of(rows, arm, "val_loss")
        assert number(cells["perplexity"][0]) == pytest.approx(np.exp(losses.mean()), rel=losses.std(ddof=1))
        assert number(cells["trainable million"][0]) == (5.4 if arm == "untied" else 3.3)
        delta = cells["Δ\N{NO-BREAK SPACE}to transpose nats"]
        if arm == "transpose":
            assert delta == ["reference"]
        else:
            assert_shown(delta, losses - of(rows, "transpose", "val_loss"))


def test_tables_come_as_csv_and_latex(reported: Reported) -> None:
    page, rows, _ = reported
    table = pd.read_csv(io.StringIO(page.download("results.csv")), index_col="arm")
    assert list(table.index) == list(ARMS)
    values = of(rows, "pit-frozen", "tokens_per_second")
    found = table.loc["pit-frozen", ["speed (tokens/s)", "speed (tokens/s), sd"]]
    np.testing.assert_allclose(found.astype(float), [values.mean(), values.std(ddof=1)])
    assert math.isnan(table.loc["untied", "defect"])
    lines = page.download("results.tex").splitlines()
    assert lines[0].startswith(r"\begin{tabular}") and sum(line.endswith(r"\\") for line in lines) == 1 + len(ARMS)
    assert r"$\pm$" in lines[4] and r"$\times10^{-7}$" in page.download("results.tex") and lines[4].count("&") == 11


def test_the_page_opens_with_the_findings_and_ends_with_how_they_came_about(reported: Reported) -> None:
    page, rows, _ = reported
    text = "".join(page.text).replace("\N{NO-BREAK SPACE}", " ")
    how = ("Results", "manifold-tying ablate --preset nano --out runs/x", "abacus", "batch size", "‖Z⊤Z − I‖F")
    assert all(wanted in text for wanted in (*findings(rows), *how))
    assert text.index(findings(rows)[0]) < text.index("Results")
    by_arm = {"".join(row[0]): ["".join(cell) for cell in row[1:]] for row in page.tables[-1][1:]}
    assert by_arm["memory lr"] == ["—", "—", "—", "0.00123457"]


def test_a_figure_shows_the_arms_that_have_its_quantity(reported: Reported) -> None:
    page, _, _ = reported
    assert len(page.figures) == len(FIGURES) == 6
    for spec, figure, data in zip(FIGURES, page.figures, page.data(), strict=True):
        expected = set(ARMS[2:] if spec.y in ("defect", "cond_transform") else ARMS)
        described = {arm for arm in ARMS if arm in figure["aria-label"]}
        assert described == {trace["name"] for trace in data["data"]} == expected and figure["role"] == "img"
        assert {ARMS[trace["meta"]["arm"]] for trace in data["data"]} == expected
        assert data["log"] == spec.log
    captions = "".join(page.text)
    assert captions.count("Left out, with no positive value of this quantity: untied, transpose.") == 2
    assert "each point is the mean over the last 2 steps" in captions


def test_the_page_holds_the_numbers_that_its_figures_show(reported: Reported) -> None:
    page, _, out = reported
    bands, lines = page.data()[0]["data"][::2], page.data()[0]["data"][1::2]
    for arm, band, line in zip(ARMS, bands, lines, strict=True):
        files = [out / f"{arm}-{seed}" / "metrics.jsonl" for seed in (0, 1)]
        of_seeds = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        values = np.array([[line["val_loss"] for line in lines if "val_loss" in line] for lines in of_seeds])
        low, high = values.min(axis=0), values.max(axis=0)
        assert line["name"] == band["name"] == arm and line["x"] == [512.0 * step for step in range(10, 81, 10)]
        np.testing.assert_allclose(line["y"], values.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose([ends[1:] for ends in line["customdata"]], np.stack([low, high], axis=1), rtol=1e-6)
        np.testing.assert_allclose(band["y"], np.concatenate([low, high[::-1]]), rtol=1e-6)
        assert line["customdata"][0][0] == f", perplexity {significant(math.exp(line['y'][0]))}"
    seconds = [trace["hovertemplate"] for trace in page.data()[1]["data"] if "customdata" in trace]
    assert all(one.endswith(" at %{x:.4g} s") for one in seconds), "no other arm was measured then"
    listed = pd.read_csv(io.StringIO(page.download("val-loss-tokens-values.csv")))
    np.testing.assert_allclose(listed["mean"], np.concatenate([line["y"] for line in lines]), rtol=1e-6)
    assert list(listed["tokens"][:8]) == lines[0]["x"]


def test_the_page_fetches_nothing_and_runs_its_own_script_alone(reported: Reported) -> None:
    page, _, out = reported
    assert {"link", "iframe", "object", "form", "base"}.isdisjoint(tag for tag, _ in page.tags)
    assert [attributes for attributes, _ in page.scripts if "type" not in attributes] == [{}]
    (packed,) = [text for attributes, text in page.scripts if attributes.get("id") == "plotly"]
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in (page.scripts[-1][1], gzip.decompress(base64.b64decode(packed)).decode())
    ]
    assert [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes] == [
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'"
    ]
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "srcset"]
        assert attributes.get("src", "data:").startswith("data:")
        assert attributes.get("href", "#").startswith(("#", "data:"))
    markup = (out / "report.html").read_text(encoding="utf-8")
    shown = re.sub(r"(?<=id=\"plotly\">)[^<]*", "", markup)
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import", shown)
    assert len(markup.encode()) < 3e6


def test_what_comes_from_data_is_escaped(tmp_path: Path) -> None:
    arm, command, value = '<script>x" & $x^2$', 'run "$title" </code><script>y', "</style><img src=x onerror=z>"
    write_experiment(tmp_path, arms=(arm,), seeds=(0,))
    described = {"command": command, "settings": {"preset": value, value: [value]}, "machine": {value: value}}
    described |= {"arms": {arm: {value: value}, value: {}}}
    (tmp_path / "experiment.json").write_text(json.dumps(described))
    page = reported_page(tmp_path)
    assert [tag for tag, _ in page.tags].count("script") == len(page.figures) + 3 == 7  # themes, plotly and ours
    assert not any("onerror" in of for _, of in page.tags)
    text = "".join(page.text)
    # title, heading; preset; a setting, its value; the same of machine and arm; the waiting arm's column and name
    assert command in text and text.count(value) == 11 and text.count(arm) >= 4


def test_names_in_figures_and_their_numbers_are_escaped(tmp_path: Path) -> None:
    """One of them is the end of a script only where the folder's name meets the arm's."""
    arms = {"x<": "script>z", "y": r"</script><!--<script>&$\oops$"}
    for folder, arm in arms.items():
        write_experiment(tmp_path / folder, arms=(arm,), seeds=(0,))
    page = Page(write_report(load_experiments([tmp_path / folder for folder in arms]), tmp_path))
    assert [tag for tag, _ in page.tags].count("script") == len(page.figures) + 3 == 7
    for data in page.data():  # plotly's names are markup, in which &lt; is <
        names = {one["name"] for one in data["data"]}
        assert set(map(html.unescape, names)) == set(map("/".join, arms.items())) and "<" not in "".join(names)
    assert "<!--<" not in (tmp_path / "report.html").read_text()


def test_one_seed_and_one_arm(tmp_path: Path) -> None:
    rows = write_experiment(tmp_path, arms=("untied",), seeds=(7,))
    page = reported_page(tmp_path)
    cells = dict(zip(("".join(cell) for cell in page.tables[0][0]), page.tables[0][1], strict=True))
    assert cells["val loss nats"] == [f"{rows[0]['val_loss']:.4f}", "—"]
    assert cells["Δ\N{NO-BREAK SPACE}to transpose nats"] == ["—"]
    text = "".join(page.text)
    assert "There is no transpose arm" in text and "There is no other arm to compare it with." in text
    assert "Not drawn, since no arm has a value for it: Defect; Condition number of the transform." in text
    assert "One seed, so there is no band." in text
    assert len(page.figures) == 4


def test_a_diverged_run_is_shown_and_not_compared(tmp_path: Path) -> None:
    rows = write_experiment(tmp_path, arms=("untied", "transpose"))
    metrics = [json.loads(line) for line in (tmp_path / "untied-1" / "metrics.jsonl").read_text().splitlines()]
    for line in metrics[40:]:
        line["loss"] = math.nan
        if "val_loss" in line:
            line["val_loss"] = math.inf
    write_lines(tmp_path / "untied-1" / "metrics.jsonl", metrics)
    rows[1]["val_loss"] = None  # what JSON has for NaN
    (tmp_path / "summary.json").write_text(json.dumps(rows))
    page = reported_page(tmp_path)
    assert page.tables[0][1][2] == ["nan", "± nan"]
    line = next(trace for trace in page.data()[0]["data"] if trace["name"] == "untied" and "customdata" in trace)
    assert len(line["x"]) == 8 and line["y"][4:] == [None] * 4 != line["y"][:4], "a gap from where it diverged on"
    assert findings(rows)[0].startswith("transpose: validation loss")
    assert "left out of the comparison: untied." in findings(rows)[1]


def test_a_reader_sees_the_old_page_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_experiment(tmp_path, arms=("transpose",), seeds=(0,))
    (tmp_path / "report.html").write_bytes(MARK + b"old")
    before = tree(tmp_path)

    def interrupted(source: Path, target: Path) -> None:
        assert source.read_text(encoding="utf-8").endswith("</html>\n"), "whole before it is renamed"
        assert source.parent == target.parent, "a rename is atomic within a file system only"
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(load_experiment(tmp_path), tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("mark", [b"", MARK])
def test_no_file_that_is_not_ours_is_replaced_or_removed(tmp_path: Path, mark: bytes) -> None:
    write_experiment(tmp_path, arms=("transpose",), seeds=(0,))
    for name in ("report.html", "defect.png", "val-loss-tokens.png"):
        (tmp_path / name).write_bytes(b"the user's" + mark)
    before = tree(tmp_path)
    if mark:
        del before[write_report(load_experiment(tmp_path), tmp_path).name]
    else:
        with pytest.raises(ValueError, match=r"report\.html is not a report of manifold-tying; move it"):
            write_report(load_experiment(tmp_path), tmp_path)
    with pytest.raises(ValueError, match=r"cannot write to \S+defect\.png: \w+"):
        write_report(load_experiment(tmp_path), tmp_path / "defect.png")
    after = tree(tmp_path)
    assert before.items() <= after.items() and len(after) - len(before) == bool(mark)


# findings


def test_findings_name_the_best_arm_and_the_gap_over_shared_seeds() -> None:
    rows = with_losses({"untied": [4.30, 4.33, 4.3], "transpose": [4.20, 4.21, 4.2], "pit-frozen": [4.15, 4.17, 4.16]})
    gap = np.array([4.20, 4.21, 4.2]) - np.array([4.15, 4.17, 4.16])
    own, spread = np.std([4.15, 4.17, 4.16], ddof=1), gap.std(ddof=1)
    best, memory = findings(rows)
    assert best == (
        f"pit-frozen ends with the lowest validation loss, 4.160 ± {own:.3f} nats per token (perplexity 64.1) over 3 seeds. "
        f"That is {gap.mean():.3f} ± {spread:.3f} nats below transpose, the next best; it is ahead in 3 of 3 seeds and "
        "by more than the spread between seeds."
    )
    assert memory.startswith("Frozen against trainable memory: no answer")


def test_findings_compare_frozen_with_trainable_memory() -> None:
    better = findings(with_losses({"pit-frozen": [4.20, 4.30, 4.40], "pit-trainable": [4.15, 4.24, 4.33]}))[-1]
    assert "pit-trainable ends 0.060 ± 0.010 nats below pit-frozen, in 3 of 3 seeds and by more" in better
    assert "tokens per second" not in better  # that depends on what else the machine did


def test_variants_of_an_arm_count_as_that_arm() -> None:
    rows = with_losses(
        {"transpose+lr=0.1": [4.2, 4.3], "pit-frozen": [4.2, 4.3], "pit-trainable+lr=0.1": [4.3, 4.4],
         "pit-trainable+lr=0.2": [4.1, 4.2], "pit-trainable": [4.5, 4.6]}
    )  # fmt: skip
    assert "pit-trainable+lr=0.2 (the best of 3) ends 0.1000 ± 0.0000 nats below pit-frozen" in findings(rows)[1]
    lines = [line.split() for line in printed(rows).splitlines()]
    assert ["transpose+lr=0.1", "2", "4.25", "reference"] in [line[:4] for line in lines]


def test_findings_doubt_what_is_within_the_spread() -> None:
    for sentence in findings(with_losses({"pit-frozen": [4.20, 4.30, 4.2], "pit-trainable": [4.15, 4.33, 4.2]})):
        assert "within the spread between seeds: this experiment does not tell the two apart" in sentence
        assert "by more than" not in sentence
    for sentence in findings(with_losses({"pit-frozen": [4.20], "pit-trainable": [4.15]})):
        assert "With one seed little is known about the spread" in sentence
    for sentence in findings(with_losses({"pit-frozen": [4.20, 4.21], "pit-trainable": [4.15, 4.19]})):
        assert "With 2 seeds little is known about the spread" in sentence
    # 88 standard deviations: Student's t with one degree of freedom gives p = 0.5 %.
    for sentence in findings(with_losses({"pit-frozen": [5.600, 5.623], "pit-trainable": [4.20, 4.20]})):
        assert "± 0.016" in sentence and "in 2 of 2 seeds and by more than the spread" in sentence
        assert "chance" not in sentence
    tie = findings(with_losses({"untied": [4.20, 4.30, 4.2], "transpose": [4.20, 4.30, 4.2]}))
    assert "does not tell the two apart" in tie[0]


def test_arms_are_ranked_over_the_seeds_that_all_have() -> None:
    rows = with_losses({"untied": [4.0, 4.4], "transpose": [4.1, 4.5]})
    lucky = [row for row in rows if (row["arm"], row["seed"]) != ("transpose", 1)]  # its mean is now the lower one
    assert findings(lucky)[0].startswith(
        "untied has the lowest mean validation loss, 4.0000 nats per token (perplexity 54.6) over one seed"
    )
    # the gap is that of the same seeds: over all of theirs untied would be ahead
    diverged = with_losses({"transpose": [4.19, 4.5, 4.5], "untied": [4.2, 4.2, 4.2], "pit-free": [4.3]})
    assert "0.0100 nats below untied, the next best. With one seed little is known" in findings(diverged)[0]
    strangers = [row for row in rows if row["seed"] == (row["arm"] == "transpose")]
    assert "not all arms share a seed" in findings(strangers)[0]


# the table in the terminal


def test_the_terminal_table_says_the_same_in_120_columns() -> None:
    long = "pit-trainable-with-a-long-name [bold]x"
    rows = with_losses({"transpose": [4.2, 4.4], long: [4.1, 4.15], "untied": [4.5]})
    for row in rows:
        row.update(defect=1.234e-7, delta_ti=2.5e-5, cond_transform=12.5, tokens_per_second=1.2e6,
                   trainable_parameters=1.34e9, peak_memory_bytes=139e9, train_loss=10.25)  # fmt: skip
    lines = printed(rows).splitlines()
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    position = [text.index(word) for word in ("4.30", "4.12", "4.5000")]
    assert position == sorted(position), "arms in the order of the rows"
    for wanted in ("−0.18", "± 0.11", "± 0.14", "reference", "1,200,000", "129.45", "1.2×10⁻⁷", "12.5",
                   "1,340.00", "[bold]x", "different seeds (transpose: 0, 1;"):  # fmt: skip
        assert wanted in text, wanted
    assert "…" not in text, "nothing is cut off"
    with pytest.raises(ValueError, match="arm 'transpose' with seed 0 appears twice"):
        summary_table(rows + rows)


# curves


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns, dtype=float)


def test_of_a_long_curve_evenly_spaced_points_are_kept() -> None:
    steps = range(1, 4 * MOST)
    line = curve([frame(step=steps, tokens=steps, loss=steps)], "tokens", "loss")
    assert line is not None and len(line) == MOST
    assert (line.x.iloc[0], line.x.iloc[-1]) == (1, 4 * MOST - 1)
    assert set(np.diff(line.x)) <= {3.0, 4.0, 5.0}
    np.testing.assert_array_equal(line["mean"], line.x)


def test_a_curve_is_the_mean_of_its_seeds_at_the_steps_they_share() -> None:
    noise = np.random.default_rng(0)
    losses = noise.normal(4, 1, size=(3, 10))
    times = noise.uniform(1, 2, size=(3, 10)).cumsum(axis=1)
    frames = [
        frame(step=range(count), tokens=8 * np.arange(count), loss=losses[seed, :count], seconds=times[seed, :count])
        for seed, count in enumerate((10, 9, 10))
    ]
    line = curve(frames, "seconds", "loss")
    assert line is not None and (line.seeds == 3).all()
    expected = {"x": times.mean(0), "mean": losses.mean(0), "low": losses.min(0), "high": losses.max(0)}
    for key, values in expected.items():
        np.testing.assert_allclose(line[key], values[:9], rtol=1e-14)
    smooth = curve(frames, "tokens", "loss", window=4)
    assert smooth is not None
    by_hand = np.stack([np.convolve(row[:9], np.ones(4) / 4, mode="valid") for row in losses])
    np.testing.assert_allclose(smooth["mean"][3:], by_hand.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(smooth["high"][3:], by_hand.max(axis=0), rtol=1e-12)
    np.testing.assert_allclose(smooth.x, 8.0 * np.arange(9))
    assert curve(frames, "tokens", "defect") is None
    positive = curve(frames, "tokens", "tokens", positive=True)
    assert positive is not None and list(np.isnan(positive["mean"])) == [True] + [False] * 8
    frames[1].loc[2, "loss"] = np.inf  # a measurement that is no number is a gap, and not a step that is missing
    gap = curve(frames, "tokens", "loss")
    assert gap is not None and list(np.flatnonzero(np.isnan(gap["mean"]))) == [2]


def test_curves_of_weights_are_those_of_numpy() -> None:
    noise, steps, weights = np.random.default_rng(0), np.arange(0, 24, 4), ("up", "down")
    names = ("R.vector", "R.trace", "R.trace_std")
    probed = {(seed, weight): noise.uniform(1, 2, size=(6, 3)) for seed in (0, 1) for weight in weights}
    runs = []
    for seed in (0, 1):
        numbers = {weight: dict(zip(names, probed[seed, weight].T, strict=True)) for weight in weights}
        probes = [frame(step=steps, tokens=8 * steps, **of).assign(weight=weight) for weight, of in numbers.items()]
        runs.append(Run(arm="a", seed=seed, metrics=frame(step=[], tokens=[]), probes=pd.concat(probes)))
    row = {"arm": "a", "seed": 0, "orthogonality_error": 1e-7}
    found = {f.name: c for f, c in drawn(Experiment(rows=[row], runs=runs, sources=[], settings={}, arms={}))[0]}
    assert set(found) == {"turning-R"}
    turning = found["turning-R"]
    for weight in weights:
        vector, trace, spread = (np.stack([probed[seed, weight][:, i] for seed in (0, 1)]) for i in range(3))
        lines = {quantity: of for quantity, of in turning[turning.weight == weight].groupby("quantity")}
        np.testing.assert_allclose(lines[""]["mean"], vector.mean(axis=0))
        np.testing.assert_allclose(lines["tr R / m"]["low"], (trace - 2 * spread).mean(axis=0))
        np.testing.assert_allclose(lines["tr R / m"]["high"], (trace + 2 * spread).mean(axis=0))


# reading


def replaced(name: str, text: str) -> Callable[[Path], object]:
    return lambda out: (out / name).write_text(text)


def changed_row(**changes: Any) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        rows = json.loads((out / "summary.json").read_text())
        (out / "summary.json").write_text(json.dumps([rows[0] | changes]))

    return change


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda out: (out / "summary.json").unlink(), r"summary\.json is missing.*--out"),
        (replaced("summary.json", "[{"), r"summary\.json: not JSON.*line 1.*command that wrote"),
        (replaced("summary.json", "[]"), r"no run has finished"),
        (replaced("summary.json", '[{"arm": "untied"}]'), r"entry 0: missing seed, val_loss"),
        (changed_row(tokens=None), r"expected a number under 'tokens', got None"),
        (changed_row(held_out_sha256=None), r"expected a string under 'held_out_sha256', got None"),
        (changed_row(arm="other"), r"an arm 'other' that experiment\.json lacks"),
        (
            replaced("untied-0/metrics.jsonl", '{"step": 1, "tokens": 8}\n{"step": 2, "to'),
            r"line 2: not JSON.*interrupted",
        ),
        (replaced("untied-0/timing.jsonl", '{"step": 1}'), r"timing\.jsonl, line 1: expected a number under 'seconds'"),
    ],
)
def test_a_damaged_experiment_is_refused_with_the_place(
    tmp_path: Path, damage: Callable[[Path], object], complaint: str
) -> None:
    write_experiment(tmp_path, arms=("untied",), seeds=(0,))
    load_experiment(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        load_experiment(tmp_path)


def test_what_was_not_measured_is_null_and_not_an_error(tmp_path: Path) -> None:
    rows = write_experiment(tmp_path, arms=("untied",), seeds=(0,))
    rows[0] |= {"peak_memory_bytes": None, "defect": None, "delta_ti": None, "cond_transform": None}
    (tmp_path / "summary.json").write_text(json.dumps(rows))
    assert printed(list(map(dict, load_experiment(tmp_path).rows))).count("—") >= 5
