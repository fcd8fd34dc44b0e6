"""Measure everything on a machine with a GPU. The same command again resumes.

    python -m benchmarks.gpu --out runs/gpu                        # or make gpu
    python -m benchmarks.gpu --out runs/try --tiny --device cpu    # a rehearsal of a few minutes

The pieces, most important first: the CUDA tests, the benchmarks with their peers, training steps, and the comparison of
docs/from-scratch.md at 42 M parameters with three seeds. Each is a process of its own, so that none stops the others. A
benchmark keeps the rows that it has measured, and a training run its checkpoints. What failed, or made no progress in its whole
time, runs again in the next call, after the other pieces.

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
from collections.abc import Sequence
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
# The corpus of docs/from-scratch.md
SOURCES = "matplotlib networkx numpy pandas scipy sklearn sympy".split()
ARMS = (
    "pit-free+table_std=0.02",
    "pit-trainable",
    "transpose+embedding_norm=true+table_std=0.02+table_lr=0.006+table_slows_after=60+lr=0.0005",
    "untied+embedding_norm=true+table_lr=0.018+table_slows_after=60+lr=0.001",
)
TESTS = "-m cuda tests/unit/test_cuda.py tests/unit/training/test_training.py"
ABLATION = (
    "--preset poet-60m --batch-size 32 --sequence-length 512 --val-tokens 262144 "
    "--steps 800 --eval-every 100 --checkpoint-every 100"
)
STEP, POET_STEP = (f"{name} --dtype bfloat16 --rounds 5" for name in ("training_step", "poet_step"))
LAYERS = "nn.Linear 'ours block' 'PEFT OFT (P alone)'"
GRAPHS = "'nn.Linear, CUDA graph' 'ours block, CUDA graph' 'PEFT OFT, CUDA graph' 'nn.Linear, compiled' 'ours block, compiled'"
FAST = "floor 'floor (fused Adam)' ours 'ours, project_every=8' 'ours, medium' geoopt 'geoopt, medium' POGO"
REPLAYED = "'ours, CUDA graph' 'POGO, CUDA graph'"
MUONS = "'our Muon' 'our Muon, medium' 'torch Muon' 'Emerging-Optimizers Muon'"
SPEL = "'Emerging-Optimizers Spel' 'Emerging-Optimizers Spel, highest'"
LARGE = "V=8192 V=32000 V=151936 V=2048 V=4096 'V=1024 d' '4 x (' 'V=96 d' 'V=16 d'"
SIZE_60M = "--rows poet-60m --tokens 16384 --sequence-length 512"
BODIES = "adamw 'poet-block 256' 'poet-block 256, two terms' 'poet-block 64' 'poet-full 1/2'"
COMPILED = "'adamw, compiled' 'poet-block 256, two terms, compiled'"
BILLION = "--preset poet-1.3b --tokens 4096 --sequence-length 512"
LAST = "riemannian-step-slow"  # after the ablations, since a row takes minutes
# Commands below benchmarks/, most important first.
BENCHMARKS = {
    "equivalence": f"equivalence --dtype bfloat16 --rounds 10 --only {LAYERS} {GRAPHS}",
    "interface": "interface --dtype bfloat16 --rounds 10",
    "riemannian-step": f"riemannian_step --rounds 10 --rows {LARGE} --only {FAST} {REPLAYED} {MUONS} {SPEL}",
    "riemannian-step-small": "riemannian_step --rounds 10 --rows 'V=8 d' 'V=64 d' 'V=256 d' shapes",
    "maps": "maps --rounds 8",
    "adapters": "adapters --dtype bfloat16 --rounds 10",
    # The official layer compiles for up to two minutes at each size.
    "equivalence-official": f"equivalence --dtype bfloat16 --rows x40 --only {LAYERS} 'official POET'",
    "training-step-poet-60m": f"{STEP} --preset poet-60m --tokens 16384 --sequence-length 512 --compile",
    "poet-step-60m": f"{POET_STEP} {SIZE_60M} --compile --only {BODIES} {COMPILED}",
    "poet-step-official": f"{POET_STEP} {SIZE_60M} --only 'poet-block 256, two terms' 'official POET'",
    "training-step-pit-0.3b": f"{STEP} --preset pit-0.3b --tokens 8192 --sequence-length 1024 --compile",
    # Two models of 1.3 B parameters with their optimizers fit into 80 GB, all six do not.
    "training-step-poet-1.3b-pit-free": f"{STEP} {BILLION} --only pit-free",
    "training-step-poet-1.3b-transformers": f"{STEP} {BILLION} --only transformers",
    "poet-step-1.3b": f"{POET_STEP} --rows poet-1.3b --tokens 4096 --only {BODIES}",
    LAST: "riemannian_step --rounds 10 --rows V=8192 V=2048 V=4096 'V=1024 d' '4 x (' --only 'torch orthogonal' geotorch",
}


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
    peers: tuple[Path, ...] = ()
    """Checkouts to import peers from that are not installed: POET's official code, NVIDIA's Emerging-Optimizers."""

    def __post_init__(self) -> None:
        check_device(self.device)
        if absent := [str(path) for path in self.peers if not path.is_dir()]:
            raise ValueError(f"expected folders for --peers, {', '.join(absent)} is none")
        # Pieces run at the top of the repository; relative to it, DIR can continue on another machine.
        out = self.out.resolve()
        object.__setattr__(self, "out", out.relative_to(ROOT) if out.is_relative_to(ROOT) else out)
        object.__setattr__(self, "peers", tuple(path.resolve() for path in self.peers))


def pieces(options: Options) -> dict[str, list[str]]:
    """Arguments for Python by name of piece, most important first."""
    tests = "tests/unit/test_layers.py" if options.device == "cpu" else TESTS
    found = {"tests": f"-m pytest -p no:cacheprovider {tests}".split()}
    for name, command in BENCHMARKS.items():
        words = shlex.split(f"-m benchmarks.{command} --device {options.device} --resume")
        if options.tiny:
            words = [word for word in words if "compile" not in word] + "--quick --rounds 1 --warmup 0".split()
        found[name] = [*words, "--out", str(options.out / f"results/{name}.json")]
    shape, data = ABLATION, f"text:{options.out / 'work/source'}"
    if options.tiny:
        shape, data = "--preset bytes --batch-size 2 --sequence-length 32 --val-tokens 256 --steps 4", "text:docs"
    # The same folder with one, two and three seeds: a piece trains what the ones before it left.
    for seeds in (1,) if options.tiny else (1, 2, 3):
        words = f"-m manifold_tying ablate --device {options.device} {shape} --keep-checkpoints 1".split()
        to = ["--data", data, "--out", str(options.out / "work/ablation"), "--arms", ",".join(ARMS)]
        found[f"ablation-{seeds}"] = [*words, *to, "--seeds", str(seeds)]
    found[LAST] = found.pop(LAST)
    return found


def collect(out: Path) -> dict[str, Any]:
    """The ablation's results, with the curves and the packages of the corpus."""
    folder, source = out / "work/ablation", out / "work/source"
    logs = {path.parent.name: path.read_text().splitlines() for path in sorted(folder.glob("*/metrics.jsonl"))}
    curves = {run: [entry for entry in map(json.loads, log) if "val_loss" in entry] for run, log in logs.items()}
    names = ["scikit-learn" if name == "sklearn" else name for name in SOURCES if (source / name).exists()]
    runs = json.loads((folder / "summary.json").read_text())
    return {"corpus": {name: version(name) for name in names}, "runs": runs, "curves": curves}


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


def run(todo: dict[str, list[str]], options: Options) -> dict[str, Any]:
    """Run what is not done, until the time is up or all has ended; returns the state by name of piece."""
    out, end = options.out, time.monotonic() + 60 * options.total
    for name in ("results", "logs", "work"):
        (out / name).mkdir(parents=True, exist_ok=True)
    path = out / "state.json"
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    commands = {name: shlex.join(["python", *arguments]) for name, arguments in todo.items()}
    new = {"status": "not started", "seconds": 0}
    # A piece whose command has changed since starts anew; a benchmark's rows name their own command.
    state = {name: state[name] if state.get(name, new).get("command") == commands[name] else new for name in todo}
    left = [name for name in todo if state[name]["status"] != "done"]
    left.sort(key=lambda name: state[name]["status"] in ("failed", "stalled"))
    while left:
        name, seconds = left.pop(0), min(60 * options.minutes, end - time.monotonic())
        if seconds < 6 * options.minutes:  # a tenth: hardly more than imports
            break
        print(f"{name} ...", flush=True)
        before, began = _traces(name, out), time.monotonic()
        code = _attempt(name, todo[name], options, seconds)
        status = "done" if code == 0 else "failed"
        if code is None:
            # Without a new row or checkpoint in the whole time, it would never end.
            whole = seconds == 60 * options.minutes
            status = "stalled" if whole and _traces(name, out) == before else "unfinished"
        if status == "unfinished":
            left.append(name)
        took = state[name]["seconds"] + time.monotonic() - began
        state[name] = {"status": status, "exit": code, "seconds": round(took, 1), "command": commands[name]}
        if (out / "work/ablation/summary.json").exists():
            write_atomic(out / "results/ablation.json", json.dumps(collect(out), indent=1).encode())
        write_atomic(path, json.dumps(state, indent=1).encode())
        write_atomic(out / "page.md", page(state, out).encode())
        print(f"{name}: {status} after {took:.0f} s", flush=True)
    return state


def _attempt(name: str, arguments: list[str], options: Options, seconds: float) -> int | None:
    """The exit status of a piece; None if it was stopped after so long."""
    search = (ROOT, *options.peers, os.environ.get("PYTHONPATH"))
    own = {"PYTHONPATH": os.pathsep.join(str(path) for path in search if path)}
    environment = {"MANIFOLD_TYING_CACHE": str(options.out / "work/cache"), **os.environ, **own}
    with (options.out / f"logs/{name}.log").open("a") as log:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # Ctrl-C and SIGTERM stop the piece, too
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # it can save
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and its children
                process.wait()


def _traces(name: str, out: Path) -> list[str]:
    """What a piece leaves when it makes progress: rows of its result, or checkpoints."""
    results = [path.read_text(encoding="utf-8") for path in out.glob(f"results/{name}.json")]
    return [*results, *sorted(map(str, out.glob("work/**/step-*")))]


def page(state: dict[str, Any], out: Path) -> str:
    """All pieces with their status, the ends of the logs of the tests and of what is not done, and the results."""
    body, ends = [], []
    for name, own in state.items():
        body.append([name, own["status"], str(own["seconds"]), f"`{own.get('command', '')}`"])
        log = out / f"logs/{name}.log"
        if log.exists() and (name == "tests" or own["status"] != "done"):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            ends.append(
                f"{name}, {own['status']}, exit status {own.get('exit')}:\n\n```\n" + "\n".join(lines[-15:]) + "\n```"
            )
    parts = ["# On a GPU", markdown_table(["piece", "status", "seconds", "command"], body, left=2), *ends]
    if (out / "results/ablation.json").exists():
        runs = json.loads((out / "results/ablation.json").read_text(encoding="utf-8"))["runs"]
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
    state = run(pieces(options), options)
    if left := [f"{name} ({own['status']})" for name, own in state.items() if own["status"] != "done"]:
        sys.exit(f"left: {', '.join(left)}. Run the same command again")
    print(f"all done: {options.out / 'page.md'}")


if __name__ == "__main__":
    main()
