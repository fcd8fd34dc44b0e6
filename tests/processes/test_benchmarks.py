"""The benchmarks: how they measure, that each one runs, and that the page shows what was measured."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import SHAPE, TINY, text

from benchmarks import _command, scaling
from benchmarks._command import ROOT, Options
from benchmarks._harness import Contender, Row, Step, Unavailable, measure_row
from benchmarks.page import main as page
from benchmarks.page import render
from manifold_tying.models import PRESETS
from manifold_tying.training.data.corpus import open_corpus

PEER_MODULES = ("geotorch", "pogo", "pogo.base", "transformers", "liger_kernel.transformers", "peft")


class Clock:
    """Time passes only where a contender says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def contender(self, name: str, *costs: float, **options: Any) -> Contender:
        """A contender whose steps take so long, one after the other."""
        left: Iterator[float] = iter(costs)

        def step() -> None:
            self.seconds += next(left)

        return Contender(name, lambda: step, **options)


def idle() -> Step:
    return lambda: None


def test_ratio_is_the_median_of_paired_ratios() -> None:
    clock = Clock()
    # ratios 2, 3, 1: their median is 2, while the ratio of the medians would be 1
    contenders = [clock.contender("a", 9, 1, 10, 2), clock.contender("b", 1, 2, 30, 2)]
    measured = measure_row(Row("row", "a", contenders), rounds=3, warmup=1, clock=clock)
    assert measured["contenders"] == {
        "a": {"milliseconds": 2000, "ratio": 1, "rounds": 3},
        "b": {"milliseconds": 2000, "ratio": 2, "rounds": 3},
    }


def test_a_slow_contender_is_measured_once() -> None:
    clock = Clock()
    contenders = [clock.contender("a", 1, 2, 3, 4), clock.contender("slow", 30, limit=20)]
    measured = measure_row(Row("row", "a", contenders), rounds=3, warmup=1, clock=clock)["contenders"]["slow"]
    assert (measured["milliseconds"], measured["ratio"], measured["rounds"]) == (30000, 10, 1)
    assert "timed once" in measured["note"]


def test_out_of_memory_is_a_reason_and_any_other_failure_ends_the_command_at_last(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def row_with(error: Exception) -> Row:
        def step() -> None:
            raise error

        return Row("row", "a", [clock.contender("a", 1, 1), Contender("b", lambda: step)])

    clock = Clock()
    measured = measure_row(row_with(torch.OutOfMemoryError("...")), rounds=2, warmup=0, clock=clock)
    assert measured["contenders"]["b"] == {"unavailable": "out of memory on this device"}
    wrong = row_with(RuntimeError("wrong shape"))
    out = tmp_path / "result.json"
    with pytest.raises(RuntimeError, match="some failed: row: b"):
        later = Row("later", "a", [Contender("a", idle)])
        _command.run("none", "", [wrong, later], Options(rounds=2, warmup=0, out=out), [])
    first, second = json.loads(out.read_text())["rows"]
    assert first["contenders"]["b"] == {"unavailable": "failed: RuntimeError: wrong shape"}
    assert "ratio" in first["contenders"]["a"] and second["row"] == "later"
    assert "Traceback" in capsys.readouterr().err


def test_contenders_are_chosen_by_name(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    row = Row("row", "a", [Contender(name, idle) for name in "abc"])
    _command.run("none", "", [row], Options(rounds=1, warmup=0, only=("b",), out=out), [])
    assert set(json.loads(out.read_text())["rows"][0]["contenders"]) == {"a", "b"}
    with pytest.raises(ValueError, match="row 'row' has no contender d; choose from a, b, c"):
        _command.run("none", "", [row], Options(only=("d",)), [])


def measured_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a result, after a look at its form."""
    result = json.loads(path.read_text())
    assert set(result) == {"benchmark", "title", "machine", "dtype", "rows"}
    for row in result["rows"]:
        assert row["command"].startswith(f"python -m benchmarks.{result['benchmark']} --quick") and "commit" in row
        assert row["reference"] in row["contenders"]
        for name, values in row["contenders"].items():
            if "unavailable" in values:
                assert values["unavailable"] and "milliseconds" not in values, name
            else:
                assert values["milliseconds"] > 0, name
        for of in row["extra"].values():
            assert set(of) <= set(row["contenders"])
    return result["rows"]


def run(name: str, out: Path, *arguments: str) -> list[dict[str, Any]]:
    import_module(f"benchmarks.{name}").main(
        ["--quick", "--rounds", "2", "--warmup", "1", "--out", str(out), *arguments]
    )
    return measured_rows(out)


def test_riemannian_step_runs(tmp_path: Path) -> None:
    """Of a batch; the contenders of one matrix run below. Each one's memory is measured in a process of its own."""
    several = ("ours, 4 parameters", "ours, Python loop")
    (row,) = run("riemannian_step", tmp_path / "result.json", "--rows", "4 x", "--only", *several)
    assert set(row["contenders"]) == {"floor", *several}
    assert all(values["memory_bytes"] >= 0 for values in row["contenders"].values())
    defects = row["extra"]["defect"]
    assert max(defects.values()) < 1e-6
    # the same steps, however the matrices are handed over
    assert defects["ours, 4 parameters"] == pytest.approx(defects["ours, Python loop"], rel=0.3)


@pytest.mark.parametrize("label", ["V=96 d=8", "V=16 d=16"])
def test_optimizers_are_compared_at_steps_of_the_same_length(label: str) -> None:
    from benchmarks.riemannian_step import Optimizing, rows

    (row,) = (row for row in rows(Options(quick=True)) if row.label == label)
    lengths = {}
    for contender in row.contenders:
        with suppress(Unavailable):
            step = contender.build()
            if not isinstance(step, Optimizing):
                step()
            else:
                (X,) = step.parameters
                before = X.detach().clone()
                step()
                lengths[contender.name] = float((X.detach() - before).norm()) / (0.1 * X.shape[1] ** 0.5)
    assert set(lengths) >= {"ours", "geoopt", "torch Muon" if hasattr(torch.optim, "Muon") else "ours"}
    assert all(0.6 <= length <= 1.4 for length in lengths.values()), lengths


def test_interfaces_run(tmp_path: Path) -> None:
    (row,) = run("interface", tmp_path / "result.json")
    losses = row["extra"]["loss"]
    tied = [loss for name, loss in losses.items() if name.startswith("transpose")]
    torchs_own = hasattr(torch.nn.functional, "linear_cross_entropy")  # from torch 2.13 on
    assert len(tied) >= 2 + torchs_own
    assert max(tied) - min(tied) < 1e-4
    assert all(error < 1e-5 for error in row["extra"]["gradient error"].values())
    assert row["memory_unit"] == "logits"
    if not torch.cuda.is_available():
        assert row["contenders"]["transpose, Liger"] == {"unavailable": "needs CUDA"}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_constraints_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    row, *others = run("constraints", tmp_path / "result.json", "--rows", "8 x 4", "low_rank", "sphere of")
    assert row["contenders"]["20 rounds, compiled"]["ratio"] == 1
    assert row["extra"]["off"]["ours"] < 1e-6 and row["extra"]["off"]["ours, compiled"] < 1e-6
    assert [row["row"].split()[0] for row in others] == ["low_rank", "sphere", "sphere", "sphere"]


def test_equivalence_runs(tmp_path: Path) -> None:
    (row,) = run("equivalence", tmp_path / "result.json", "--rows", "24x40", "--only", "ours block")
    operations = row["extra"]["operations / nn.Linear"]
    # 24 x 40 in blocks of 8, 32 tokens: forming W takes 14 x 24 x 40 x 8 beside nn.Linear's six products
    assert operations["ours block"] == pytest.approx(
        min(4 / 6 + (24 + 40) * 8 / (24 * 40), 1 + 14 * 8 / (6 * 32)), 1e-3
    )
    assert row["contenders"]["nn.Linear"]["ratio"] == 1 and row["memory_unit"] == "weight"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_run() -> None:
    from benchmarks.adapters import rows

    (row,) = rows(Options(quick=True))
    for contender in row.contenders:
        contender.build()()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_layers_of_many_sizes_do_not_reach_dynamos_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.equivalence import Problem

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=1):
        for n in (8, 16, 24):
            Problem(n, n, 8, 4, Options()).poet(compiled=True, block_size=8)()


@pytest.mark.parametrize(("terms", "least", "most"), [(2, 0, 1e-4), (3, 1e-3, 1)])
def test_singular_values_over_a_hundred_merges(terms: int | None, least: float, most: float) -> None:
    """The bounds that are to hold at 512 x 512, here at 64 x 64; the paper's three terms as the negative control."""
    from benchmarks.merge_drift import MERGES, drifts
    from benchmarks.merge_drift import Options as Drift

    found = drifts(Drift(size=64, block_size=32), terms)
    assert least < found[100] < most and list(found) == list(MERGES)


def test_merge_clip_compares_policies_on_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, out = import_module("benchmarks.merge_clip"), tmp_path / "clip.json"
    monkeypatch.setattr(module, "open_corpus", lambda name: open_corpus(f"text:{text(tmp_path)}"))
    monkeypatch.setattr(module, "HELD_OUT", 4)
    small = {"steps": 6, "every": 3, "seeds": 1, "hidden-size": 16, "block-size": 8, "norms": 0.1, "batch-size": 2}
    options = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    module.main([*options, "--sequence-length", "8", "--out", str(out)])
    losses = {row["clipping"]: row["losses"][0] for row in json.loads(out.read_text())["rows"]}
    assert list(losses) == ["constant", "ten times the norm", "ramp"] and len(set(losses.values())) == 3


def test_compared_models_have_the_same_shape() -> None:
    from benchmarks.training_step import StepOptions, Training, rows

    (row,) = rows(StepOptions(quick=True, preset="pit-0.3b", sequence_length=16))
    built = {contender.name: contender.build() for contender in row.contenders}
    models = {name: step.model for name, step in built.items() if isinstance(step, Training)}
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert counts["transpose"] == counts["transformers"] == counts["untied"] - 300 * 16


def test_peers_that_are_not_installed_have_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in PEER_MODULES:
        monkeypatch.setitem(sys.modules, module, None)
    (row,) = run("training_step", tmp_path / "result.json")
    reasons = {name: values["unavailable"] for name, values in row["contenders"].items() if "unavailable" in values}
    assert reasons == {"transformers": "not installed: pip install transformers"}


def test_poet_steps_name_what_the_official_code_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "poet_torch", None)
    (row,) = run("poet_step", tmp_path / "result.json", "--rows", "poet-60m", "--only", "official POET")
    reason = "not installed: pip install git+https://github.com/Sphere-AI-Lab/poet"
    assert row["contenders"]["official POET"] == {"unavailable": reason}
    # a layer of width 16 has four square matrices, and three of 32 x 16
    assert row["extra"]["trainable in the body"] == {"adamw": 4 * 16**2 + 3 * 32 * 16}


def test_rows_measured_later_join_the_same_file(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    first = run("maps", out, "--rows", "24 x")[0]
    assert all(defect < 1e-5 for defect in first["extra"]["defect"].values())
    assert len(first["extra"]["gradient error"]) == 4 and max(first["extra"]["gradient error"].values()) < 1e-5
    labels = ["24 x 24", "48 x 8"]
    assert [row["row"] for row in run("maps", out, "--rows", "48 x")] == labels
    assert measured_rows(out)[0] == first
    before = measured_rows(out)
    before[1]["contenders"]["ours qr"] = {"unavailable": "failed: RuntimeError: once"}
    out.write_text(json.dumps(json.loads(out.read_text()) | {"rows": before}))
    resumed = run("maps", out, "--resume")  # only the row in which a contender failed
    assert resumed[0] == first and resumed[1]["command"].endswith("--resume")
    assert resumed[1]["contenders"]["ours qr"]["milliseconds"] > 0
    assert [row["row"] for row in run("maps", tmp_path / "both.json", "--rows", "24 x", "48 x")] == labels
    with pytest.raises(ValueError, match="another dtype, float32; expected bfloat16"):
        run("maps", out, "--dtype", "bfloat16")
    with pytest.raises(ValueError, match="no row contains V=7; choose from 24 x 24; 48 x 8"):
        run("maps", out, "--rows", "V=7")
    elsewhere = json.loads(out.read_text())
    elsewhere["machine"]["processor"] = "abacus"
    out.write_text(json.dumps(elsewhere))
    with pytest.raises(ValueError, match="abacus"):
        run("maps", out, "--rows", "24 x")
    assert json.loads(out.read_text()) == elsewhere


def save_result(
    path: Path, benchmark: str, rows: list[dict[str, Any]], dtype: str, peers: dict[str, Any], processor: str = "abacus"
) -> None:
    machine = {"processor": processor, "device": "cpu", "peers": peers}
    result = {"benchmark": benchmark, "title": benchmark, "machine": machine, "dtype": dtype, "rows": rows}
    path.write_text(json.dumps(result))


def test_page_shows_every_number_and_reason_and_check_sees_a_change(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    shutil.copy(ROOT / "benchmarks/results/ablation-nano-cpu.json", results)  # of another form
    empty = render(results)
    row: dict[str, Any] = {"row": "8 x 8", "command": "python -m benchmarks.maps --rounds 7", "commit": "0123456789"}
    contenders = {
        "a": {"milliseconds": 1.5, "ratio": 1.0, "rounds": 7, "memory_bytes": 2500000},
        "b": {"milliseconds": 12345.0, "ratio": None, "rounds": 1, "note": "timed once"},
        "c": {"unavailable": "needs CUDA"},
        "d": {"milliseconds": 3.0, "ratio": 2.0, "rounds": 7},
    }
    row |= {"reference": "a", "contenders": contenders, "extra": {"defect": {"a": 1.2e-7}}}
    save_result(results / "maps-cpu.json", "maps", [row], "bfloat16", {"geoopt": "0.5.1", "geotorch": None})
    pages = render(results)
    assert pages == render(results) != empty
    for expected in (
        "`python -m benchmarks.maps --rounds 7` at commit 0123456789",
        "| ms (× a) | a | b | d |",
        "| 8 x 8 | 1.5 (1.00) | 12,345 | 3 (2.00) |",
        "| extra MB | a |",
        "| 8 x 8 | 1.2e-07 |",
        "- 8 x 8: b: timed once\n- 8 x 8: c: needs CUDA\n",
        "Peers: geoopt 0.5.1.",
        "## abacus, bfloat16\n",
    ):
        assert expected in pages["benchmarks/maps.md"]
    assert "[Times, memory and accuracy](benchmarks/maps.md)" in pages["benchmarks.md"]
    where = ["--results", str(results), "--docs", str(tmp_path)]
    with pytest.raises(SystemExit, match="differs"):
        page([*where, "--check"])
    page(where)
    page([*where, "--check"])
    assert (tmp_path / "figures/speed-maps.svg").stat().st_size
    table = {"title": "POET, Table 5", "head": ["arm", "loss"], "body": [["xavier", "5.432"]], "notes": ["a note"]}
    described: dict[str, Any] = {"comparison": "poet-initialization", "command": "manifold-tying reproduce ..."}
    described |= {"machine": {}, "tables": [table]}
    (results / "papers-poet-initialization-cpu.json").write_text(json.dumps(described))
    with pytest.raises(SystemExit, match=r"poet-initialization-cpu\.md differs"):
        page([*where, "--check"])
    page(where)
    text = (tmp_path / "papers/poet-initialization-cpu.md").read_text()
    wanted = "# poet-initialization, cpu\n", "| xavier | 5.432 |", "- a note", "`manifold-tying reproduce ...`"
    assert all(expected in text for expected in wanted)


def test_the_page_in_docs_is_that_of_the_results() -> None:
    page(["--check"])


def test_the_table_of_scaling_is_that_of_the_results() -> None:
    tables = [json.loads(path.read_text())["rows"] for path in (scaling.Options.step, scaling.Options.interface)]
    assert scaling.table(*tables) in (ROOT / "docs/scaling.md").read_text()


def test_summary_spans_the_sizes_of_each_processor_and_dtype(tmp_path: Path) -> None:
    def save(name: str, processor: str, benchmark: str, ratios: list[dict[str, float | None]]) -> None:
        rows = [
            {"row": f"n={n}", "command": "c", "commit": "0", "reference": "floor", "extra": {}}
            | {"contenders": {k: {"milliseconds": 1.0, "ratio": ratio} for k, ratio in row.items()}}
            for n, row in enumerate(ratios)
        ]
        save_result(tmp_path / name, benchmark, rows, "float32", {}, processor)

    # 0.75 / 3 and 1.5 / 2; the third size has no peer, the fourth was refused its ratio
    several = ((0.75, 3.0), (1.5, 2.0), (9.0, None), (None, 1.0))
    save("z.json", "abacus", "riemannian_step", [{"ours": ours, "geoopt": peer} for ours, peer in several])
    save("y.json", "quipu", "riemannian_step", [{"ours": 3.0, "geoopt": 2.0}])
    save("b.json", "abacus", "juggling", [{"ours": 1.0}])
    save("a.json", "abacus", "poet_step", [{"adamw": 1.0}])
    pages = render(tmp_path)
    text = pages["benchmarks.md"]
    assert "| `RiemannianAdam` | geoopt | 0.25 to 0.75 (2) | **1.50** (1) |" in text
    assert "No GPU has been measured." in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## In short", "## riemannian_step", "## poet_step", "## juggling", "## Terms"]
    assert pages["benchmarks/riemannian_step.md"].count("\n## ") == 2


def test_parts_of_pit_are_loosened_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("benchmarks.pit_parts")
    monkeypatch.setitem(PRESETS, TINY, SHAPE)
    out = tmp_path / "parts.json"
    arguments = ["--preset", TINY, "--data", f"text:{text(tmp_path)}", "--tokens", "3072", "--seeds", "1"]
    arguments += ["--out", str(out)]
    module.main([*arguments, "--variants", "pit", "two-transforms"])
    first = json.loads(out.read_text())["rows"]
    module.main(arguments)  # adds what is missing
    rows = json.loads(out.read_text())["rows"]
    assert rows[:2] == first and [row["variant"] for row in rows] == list(module.VARIANTS)
    assert {row["variant"] for row in rows if row["delta_ti"] < 1e-4} == {"pit", "scalar", "table"}
    assert len({row["val_loss"] for row in rows}) == len(rows)


def test_lengths_collect_runs_and_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, runs = tmp_path / "results", tmp_path / "runs/tokens-2048"
    shutil.copytree(ROOT / "benchmarks/results", results)
    runs.mkdir(parents=True)
    settings = {"preset": "mini", "data": "text:prose.txt"}
    (runs / "experiment.json").write_text(json.dumps({"settings": settings}))
    module = import_module("benchmarks.lengths")
    for arm, seed, loss in (
        ("pit-free", 0, 5.0),
        ("pit-free", 1, 5.1),
        ("pit-free+lr=0.001", 0, 5.2),
        ("transpose+embedding_norm=true+lr=0.002", 0, 6.0),
    ):
        row = dict.fromkeys(module.KEPT) | {"arm": arm, "seed": seed, "tokens": 2048, "val_loss": loss}
        (runs / f"{arm}-{seed}").mkdir()
        (runs / f"{arm}-{seed}/result.json").write_text(json.dumps(row))
    module.main([str(runs.parent), "--results", str(results), "--figure", str(tmp_path / "lengths.svg")])
    shown = capsys.readouterr().out
    assert "| PIT, free table | 5.050 ± 0.071 |" in shown and "| mini, prose | 2,048 tokens |" in shown
    assert "| mini | prose | 2,048 | +0.950 |" in shown
    assert "normalized transpose tying" in (tmp_path / "lengths.svg").read_text()


def test_bodies_collect_runs_and_show_the_best_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = tmp_path / "runs/tokens-2048"
    budget.mkdir(parents=True)
    (budget / "experiment.json").write_text(json.dumps({"settings": {"preset": "nano"}}))
    module = import_module("benchmarks.bodies")
    for arm, seed, loss, speed in (
        ("adamw+lr=0.004", 0, 5.0, 100.0),
        ("muon+lr=0.004+body_lr=0.008", 0, 4.8, 50.0),
        ("muon+lr=0.004+body_lr=0.008", 1, 4.6, 50.0),
        ("muon+lr=0.004+body_lr=0.016", 0, 4.9, 50.0),
    ):
        folder = budget / f"{arm}-{seed}"
        folder.mkdir()
        row = dict.fromkeys(module.KEPT, 1) | {
            "val_loss": loss,
            "tokens_per_second": speed,
            "tokens": 2048,
            "seed": seed,
        }
        (folder / "result.json").write_text(json.dumps(row))
        probes = [{"weights": {"w": {"singular_values": values}}} for values in ([1.0, 2.0], [1.0, 3.0], [1.5, 2.2])]
        (folder / "probes.jsonl").write_text("\n".join(map(json.dumps, probes)))
    module.main([str(budget.parent), "--results", str(tmp_path / "bodies.json")])
    shown = capsys.readouterr().out
    assert "| `muon` | 4.700 ± 0.141 | 2 | 2.00 | 0 | 2.5e-01 | 0.008 | 0.008: 4.800 / 0.016: 4.900 |" in shown
    module.main(["--results", str(tmp_path / "bodies.json")])
    assert capsys.readouterr().out == shown


def test_call_paths() -> None:
    found = import_module("benchmarks.call_paths").measure()
    assert min(min(counts) for counts in found.values()) > 0 and len(found) == 9
    assert found["PIT, frozen, backward"].functions <= found["PIT, trainable, forward"].functions
    assert found["RiemannianAdam step"].functions <= 50 and found["RiemannianAdam step"].depth <= 10


def test_the_page_of_adapters_shows_the_recorded_runs(capsys: pytest.CaptureFixture[str]) -> None:
    import_module("benchmarks.finetuning").main([])
    page = (ROOT / "docs/finetuning.md").read_text(encoding="utf-8")
    assert all(line in page for line in capsys.readouterr().out.splitlines())
