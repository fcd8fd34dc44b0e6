"""`make gpu`: what it starts, and what it leaves to the next call."""

import json
import shlex
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tyro

from benchmarks._command import select
from benchmarks.gpu import Options, pieces, run
from manifold_tying.training import AblateConfig
from manifold_tying.training.commands import parsed


def script(*lines: str) -> list[str]:
    return ["-c", "\n".join(["import os, pathlib, signal, time", *lines])]


def test_an_interrupted_call_resumes_and_no_piece_stops_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, count, mark = (tmp_path / name for name in ("results", "count", "mark"))
    half, rest = json.dumps([{"half": 1}]), json.dumps([{"half": 1}, {"rest": 1}])
    todo = {
        "counts": script(f"open({str(count)!r}, 'a').write('x')"),
        "interrupts": script(
            f"mark = pathlib.Path({str(mark)!r})",
            "if not mark.exists(): mark.touch(); os.kill(os.getppid(), signal.SIGINT); time.sleep(99)",
        ),
        "fails": script("print('this is why')", "raise SystemExit(3)"),
        "rows": script(
            f"out = pathlib.Path({str(results / 'rows.json')!r})", "known = out.exists()",
            f"out.write_text({rest!r} if known else {half!r})", "time.sleep(0.3 if known else 99)",  # tenths are shown
        ),
        "hangs": script(f"pathlib.Path({str(results / 'hangs.json')!r}).write_text('[]')", "time.sleep(99)"),
    }  # fmt: skip
    options = Options(out=tmp_path, device="cpu", minutes=0.02)

    def statuses(state: dict[str, Any]) -> list[str]:
        assert list(state) == list(todo)
        return [own["status"] for own in state.values()]

    assert set(statuses(run(todo, Options(out=tmp_path, device="cpu", total=0)))) == {"not started"}
    (results / "hangs.json").write_text("[]")  # written again, it is no progress
    with pytest.raises(KeyboardInterrupt):
        run(todo, options)
    assert statuses(json.loads((tmp_path / "state.json").read_text())) == ["done"] + 4 * ["not started"]
    state = run(todo, options)
    assert statuses(state) == ["done", "done", "failed", "done", "stalled"]
    assert state["rows"]["seconds"] > 60 * options.minutes
    assert shlex.split(state["fails"]["command"])[:2] == ["python", "-c"]
    assert (results / "rows.json").read_text() == rest and count.read_text() == "x"
    page = (tmp_path / "page.md").read_text()
    assert (
        "| fails | failed |" in page
        and "fails, failed, exit status 3:" in page
        and "this is why" in page
        and "| hangs | stalled |" in page
    )
    todo |= {"fails": script("pass"), "last": script("pass")}  # another command, and a new piece
    assert statuses(run(todo, options)) == ["done", "done", "done", "done", "stalled", "done"]
    started = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" ...")]
    assert started[-2:] == ["last ...", "hangs ..."]  # what stalled before runs after the others
    assert count.read_text() == "x"
    with pytest.raises(ValueError, match="expected folders for --peers, nowhere is none"):
        Options(out=tmp_path, device="cpu", peers=(Path("nowhere"),))


def test_a_piece_of_the_rehearsal_is_on_the_page(tmp_path: Path) -> None:
    options = Options(out=tmp_path, device="cpu", tiny=True)
    assert run({"maps": pieces(options)["maps"]}, options)["maps"]["status"] == "done"
    page = (tmp_path / "page.md").read_text()
    assert "| maps | done |" in page and "| 24 x 24 |" in page and "## In short" in page


@pytest.mark.parametrize("tiny", [False, True])
def test_every_command_is_one_that_its_script_takes(tiny: bool, tmp_path: Path) -> None:
    found = pieces(Options(out=tmp_path, device="cpu", tiny=tiny))
    for _, what, *arguments in found.values():
        if what == "manifold_tying":
            assert len(parsed(AblateConfig, "ablate", arguments[1:]).runs()) in (4, 8, 12)
        elif what != "pytest":
            module = import_module(what)
            options = tyro.cli(getattr(module, "StepOptions", module.Options), args=arguments)
            rows = [row for row in map(partial(select, options=options), module.rows(options)) if row is not None]
            assert rows and all(row.contenders for row in rows)
    assert list(found)[:2] == ["tests", "equivalence"] and list(found)[-1] == "riemannian-step-slow"
