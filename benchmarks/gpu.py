"""Measure everything on a machine with a GPU. The same command again resumes.

    python -m benchmarks.gpu --out runs/gpu                        # or make gpu
    python -m benchmarks.gpu --out runs/try --tiny --device cpu    # a rehearsal of a few minutes

The pieces, most important first: the CUDA tests, the benchmarks with their peers, training steps, and the comparison of
docs/from-scratch.md at 42 M parameters with three seeds. Each is a process of its own, so that none stops the others. A
benchmark keeps the rows that it has measured, and a training run its checkpoints.

DIR/results has a JSON file for each piece, DIR/state.json their status, DIR/page.md both as a page, DIR/logs their output, and
DIR/work the corpus and the checkpoints.
"""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks._command import ROOT
from benchmarks._summary import WORDS, summary
from benchmarks.page import load, render
from experiments.comparison import markdown_table
from manifold_tying.training.files import write_atomic
from manifold_tying.training.machine import check_device

GRACE = 20.0  # seconds that a stopped piece has to save a checkpoint
TAIL = 15  # lines of a log on the page
# The corpus of docs/from-scratch.md
SOURCES = "matplotlib networkx numpy pandas scipy sklearn sympy".split()
ARMS = (
    "pit-free+table_std=0.02",
    "pit-trainable",
    "transpose+embedding_norm=true+table_std=0.02+table_lr=0.006+table_slows_after=60+lr=0.0005",
    "untied+embedding_norm=true+table_lr=0.018+table_slows_after=60+lr=0.001",
)


@dataclass(frozen=True)
class Options:
    """What to measure, where, and for how long."""

    out: Path
    """Folder to write to, DIR."""
    device: Literal["cpu", "cuda"] = "cuda"
    minutes: float = 9
    """Stop a piece after this time; it resumes after the others, as long as it makes progress."""
    total: float = math.inf
    """Minutes for the whole call; the same command again continues."""
    tiny: bool = False
    """Use tiny sizes, to test that everything runs."""
    again: tuple[str, ...] = ()
    """Names of pieces to run again, though they failed or stalled. Rows without a failure are kept."""
    poet: Path | None = None
    """Checkout of POET's official code, put on the pieces' PYTHONPATH; no benchmark measures it yet."""
    emerging: Path | None = None
    """Checkout of NVIDIA's Emerging-Optimizers, put there, too; no benchmark measures it yet."""

    def __post_init__(self) -> None:
        check_device(self.device)
        # Pieces run at the top of the repository; relative to it, DIR can continue on another machine.
        out = self.out.resolve()
        object.__setattr__(self, "out", out.relative_to(ROOT) if out.is_relative_to(ROOT) else out)
        object.__setattr__(self, "poet", self.poet and self.poet.resolve())
        object.__setattr__(self, "emerging", self.emerging and self.emerging.resolve())


@dataclass(frozen=True)
class Piece:
    """A command for Python, and how to make its result if it does not write results/NAME.json itself."""

    name: str
    command: tuple[str, ...]
    collect: Callable[[], Any] | None = None


def pieces(options: Options) -> list[Piece]:
    """All pieces, most important first."""
    out, size = options.out, "--quick --rounds 1 --warmup 0" if options.tiny else "--rounds"

    def benchmark(name: str, module: str, rounds: int, arguments: str = "", dtype: str = "bfloat16") -> Piece:
        words = f"-m benchmarks.{module} --device {options.device} --dtype {dtype} {size}".split()
        words += ([] if options.tiny else [str(rounds)]) + ["--resume", "--out", str(out / f"results/{name}.json")]
        return Piece(name, (*words, *shlex.split(arguments)))

    def steps(name: str, arguments: str) -> Piece:
        return benchmark(f"training-step-{name}", "training_step", 5, arguments)

    def riemannian(name: str, arguments: str) -> Piece:
        return benchmark(name, "riemannian_step", 10, arguments, dtype="float32")

    compiled = "" if options.tiny else "--compile"
    on_gpu = "-m cuda tests/unit/test_cuda.py tests/unit/training/test_training.py"
    tests = f"-m pytest -p no:cacheprovider {on_gpu if options.device == 'cuda' else 'tests/unit/test_layers.py'}"
    log = out / "logs/tests.log"
    fast = "floor 'floor (fused Adam)' ours 'ours, project_every=8' 'ours, medium' geoopt POGO"
    return [
        Piece("tests", tuple(tests.split()), lambda: {"summary": log.read_text().splitlines()[-1].strip("= ")}),
        benchmark("equivalence", "equivalence", 10),
        benchmark("interface", "interface", 10),
        riemannian("riemannian-step", f"--rows V=8192 V=32000 V=151936 '4 x (' 'V=96 d' --only {fast}"),
        riemannian("riemannian-step-small", "--rows 'V=8 d' 'V=64 d' 'V=256 d' shapes"),
        benchmark("maps", "maps", 8, dtype="float32"),
        steps("poet-60m", f"--preset poet-60m --tokens 16384 --sequence-length 512 {compiled}"),
        benchmark("poet-step-60m", "poet_step", 5, "--rows poet-60m --tokens 16384 --sequence-length 512"),
        steps("pit-0.3b", f"--preset pit-0.3b --tokens 8192 --sequence-length 1024 {compiled}"),
        # Two models of 1.3 B parameters with their optimizers fit into 80 GB, all six do not.
        steps("poet-1.3b-pit-free", "--preset poet-1.3b --tokens 4096 --sequence-length 512 --only pit-free"),
        steps("poet-1.3b-transformers", "--preset poet-1.3b --tokens 4096 --sequence-length 512 --only transformers"),
        benchmark("poet-step-1.3b", "poet_step", 5, "--rows poet-1.3b --tokens 4096"),
        # The same folder with one, two and three seeds: a piece trains what the ones before it left.
        *(ablation(options, seeds) for seeds in ((1,) if options.tiny else (1, 2, 3))),
        # Last, since a row takes minutes.
        riemannian("riemannian-step-slow", "--rows V=8192 '4 x (' --only 'torch orthogonal' geotorch"),
    ]


def ablation(options: Options, seeds: int) -> Piece:
    """The comparison of docs/from-scratch.md at 42 M parameters."""
    folder, source = options.out / "work/ablation", options.out / "work/source"
    shape = "--preset poet-60m --batch-size 32 --sequence-length 512 --val-tokens 262144 --steps 800 --eval-every 100"
    data, every = f"text:{source}", 100
    if options.tiny:
        shape = "--preset bytes --batch-size 2 --sequence-length 32 --val-tokens 256 --steps 4"
        data, every = "text:docs", 2

    def collect() -> Any:
        logs = {path.parent.name: path.read_text().splitlines() for path in sorted(folder.glob("*/metrics.jsonl"))}
        curves = {run: [entry for entry in map(json.loads, log) if "val_loss" in entry] for run, log in logs.items()}
        names = ["scikit-learn" if name == "sklearn" else name for name in SOURCES if (source / name).exists()]
        runs = json.loads((folder / "summary.json").read_text())
        return {"corpus": {name: version(name) for name in names}, "runs": runs, "curves": curves}

    words = (
        f"-m manifold_tying ablate --device {options.device} {shape} --checkpoint-every {every} --keep-checkpoints 1"
    )
    paths = ("--data", data, "--out", str(folder))
    return Piece(
        f"ablation-{seeds}", (*words.split(), "--seeds", str(seeds), *paths, "--arms", ",".join(ARMS)), collect
    )


def copy_sources(folder: Path) -> None:
    """The Python files of the installed packages, below one folder."""
    draft = folder.with_name("source-draft")
    for package in SOURCES:
        found = find_spec(package)
        for origin in found.submodule_search_locations or () if found else ():
            for path in Path(origin).rglob("*.py"):
                target = draft / package / path.relative_to(origin)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    draft.rename(folder)


def run(todo: Sequence[Piece], options: Options) -> dict[str, Any]:
    """Run what has not ended yet, until the time is up; returns the state by name of piece."""
    out, end = options.out, time.monotonic() + 60 * options.total
    for name in ("results", "logs", "work"):
        (out / name).mkdir(parents=True, exist_ok=True)
    path = out / "state.json"
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    commands = {piece.name: shlex.join(["python", *piece.command]) for piece in todo}
    if changed := [name for name in state if state[name]["command"] != commands.get(name)]:
        raise ValueError(f"{out} holds other commands for {', '.join(changed)}; choose another --out")
    if unknown := [name for name in options.again if name not in commands]:
        raise ValueError(f"no piece is called {', '.join(unknown)}; choose from {', '.join(commands)}")
    for name in options.again:
        state.pop(name, None)

    def left() -> list[Piece]:
        return [piece for piece in todo if state.get(piece.name, {}).get("status", "unfinished") == "unfinished"]

    while left():
        for piece in left():
            seconds = min(60 * options.minutes, end - time.monotonic())
            if seconds < 6 * options.minutes:  # a tenth: hardly more than imports
                return state
            print(f"{piece.name} ...", flush=True)
            before, began = _traces(piece, out), time.monotonic()
            stopped, code = _attempt(piece, options, seconds)
            if piece.collect is not None:
                with suppress(OSError, ValueError, IndexError):  # it ended before it wrote anything
                    write_atomic(out / f"results/{piece.name}.json", json.dumps(piece.collect(), indent=1).encode())
            status = "done" if code == 0 else "failed"
            if stopped:
                # Without a new row or checkpoint in the whole time, it would never end.
                whole = seconds == 60 * options.minutes
                status = "stalled" if whole and _traces(piece, out) == before else "unfinished"
            took = state.get(piece.name, {}).get("seconds", 0) + time.monotonic() - began
            own = {"status": status, "exit": code, "seconds": round(took, 1), "command": commands[piece.name]}
            state[piece.name] = own
            write_atomic(path, json.dumps(state, indent=1).encode())
            write_atomic(out / "page.md", page(todo, state, out).encode())
            print(f"{piece.name}: {status} after {took:.0f} s", flush=True)
    return state


def _attempt(piece: Piece, options: Options, seconds: float) -> tuple[bool, int]:
    """Run a piece for at most so long. Returns whether it was stopped, and its exit status."""
    search = (ROOT, options.poet, options.emerging, os.environ.get("PYTHONPATH"))
    own = {"PYTHONPATH": os.pathsep.join(str(path) for path in search if path)}
    environment = {"MANIFOLD_TYING_CACHE": str(options.out / "work/cache"), **os.environ, **own}
    command = [sys.executable, *piece.command]
    with (options.out / f"logs/{piece.name}.log").open("a") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            return False, process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True, _stop(process)
        finally:  # Ctrl-C and SIGTERM stop the piece, too
            if process.poll() is None:
                _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> int:
    """Stop a process and its children: first so that it can save."""
    os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _traces(piece: Piece, out: Path) -> tuple[str, list[str]]:
    """What a piece leaves when it makes progress: rows of its result, or the names of checkpoints."""
    result = out / f"results/{piece.name}.json"
    return result.read_text(encoding="utf-8") if result.exists() else "", sorted(map(str, out.glob("work/**/step-*")))


def page(todo: Sequence[Piece], state: dict[str, Any], out: Path) -> str:
    """All pieces with their status, the ends of the logs that tell why one has not ended, and the results."""
    none: dict[str, Any] = {"status": "not started", "seconds": "", "command": ""}
    rows = [(piece.name, state.get(piece.name, none)) for piece in todo]
    table = [[name, own["status"], str(own["seconds"]), f"`{own['command']}`"] for name, own in rows]
    parts = ["# On a GPU", markdown_table(["piece", "status", "seconds", "command"], table, left=2)]
    for name, own in rows:
        if own["status"] in ("failed", "stalled", "unfinished"):
            end = (out / f"logs/{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
            parts.append(f"{name}, exit status {own['exit']}:\n\n```\n" + "\n".join(end) + "\n```")
    for path in sorted((out / "results").glob("ablation-*.json"))[-1:]:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        cells = [[run["arm"], str(run["seed"]), f"{run.get('val_loss') or math.nan:.4f}"] for run in runs]
        parts.append("## Training\n\n" + markdown_table(["arm", "seed", "validation loss"], cells))
    if found := load(out / "results"):
        texts = [text for name, text in render(out / "results").items() if name.startswith("benchmarks/")]
        parts += [summary([result for own in found.values() for result in own.values()]), *texts, WORDS]
    return "\n\n".join(parts).replace("../benchmarks.md#terms", "#terms") + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not options.tiny and not (options.out / "work/source").exists():
        copy_sources(options.out / "work/source")
    todo = pieces(options)
    state = run(todo, options)
    found = {piece.name: state.get(piece.name, {}).get("status", "not started") for piece in todo}
    if left := [f"{name} ({status})" for name, status in found.items() if status != "done"]:
        sys.exit(f"left: {', '.join(left)}. Run the same command again; failed and stalled pieces need --again NAME")
    print(f"all done: {options.out / 'page.md'}")


if __name__ == "__main__":
    main()
