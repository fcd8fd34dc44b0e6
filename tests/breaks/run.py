"""Break the package on purpose, once a break, and say which test notices: the measure of the test suite.

The .toml files list them (survivors.toml belongs to mutation.py): a name, a file of the package, the text to replace (it occurs
there once), what takes its place and the tests that belong to it. Each break is made in a copy of the checkout, where these
tests run until one fails. Exit status 1 if one goes unnoticed.

    python tests/breaks/run.py [NAME ...] [--jobs 2]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    *("manifold_tying", "tests", "benchmarks", "experiments", "docs"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"),
)


@dataclass(frozen=True)
class Break:
    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def run(broken: Break) -> tuple[Break, str, float]:
    """The test that noticed, or why nothing can be said; empty where none did. And the seconds it took."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, Path(folder, name))
        file = Path(folder, "manifold_tying", broken.file)
        text = file.read_text(encoding="utf-8")
        if text.count(broken.old) != 1:
            return broken, f"not applied: its text occurs {text.count(broken.old)} times in {broken.file}", 0.0
        file.write_text(text.replace(broken.old, broken.new), encoding="utf-8")
        tests = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *broken.tests]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": folder}
        done = subprocess.run(tests, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1, 2):
        return broken, f"not applied: pytest ended with {done.returncode}: {done.stdout[-300:]}", seconds
    noticed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return broken, noticed[0].partition(" ")[2] if noticed else "", seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="breaks to try; all of them by default")
    parser.add_argument("--jobs", type=int, default=2, help="breaks at a time")
    chosen = parser.parse_args()
    files = sorted(Path(__file__).parent.glob("[!s]*.toml"))
    listed = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]
    breaks = [Break(name=name, **entry) for entries in listed for name, entry in entries.items()]
    breaks = [broken for broken in breaks if not chosen.names or broken.name in chosen.names]
    unnoticed = 0
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for broken, noticed, seconds in pool.map(run, breaks):
            unnoticed += not noticed or noticed.startswith("not applied")
            print(f"{broken.name:40} {seconds:5.0f} s  {noticed or 'NOT NOTICED'}", flush=True)
    print(f"{len(breaks) - unnoticed} of {len(breaks)} breaks were noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
