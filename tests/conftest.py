"""What every test gets: one thread, a fixed seed, and no access to the user's cache of corpora."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings

import manifold_tying as mt

PATIENCE = 900  # seconds; on an idle machine they take one minute

# A few fixed examples for `make test`, and 20 times as many for `make test-thorough`, which sets the seed.
settings.register_profile("quick", max_examples=10, deadline=None, derandomize=True, database=None)
settings.register_profile("thorough", max_examples=200, deadline=None, database=None)
settings.load_profile("quick")

# Tests are small; more threads would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# Triton's kernels then run on a CPU. It is read when Triton is imported, which so far nothing has done.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell starts background jobs with SIGINT ignored, and the runs that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, and so count, the tests that need a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    without = [item for item in items if item.get_closest_marker("cuda") is None]
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("cuda")])
    items[:] = without


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def changed_profile(**changes: Any) -> Iterator[None]:
    before = settings.get_current_profile_name()
    settings.register_profile(f"{before}, changed", settings.get_profile(before), **changes)
    settings.load_profile(f"{before}, changed")
    yield
    settings.load_profile(before)


@pytest.fixture
def without_shrinking() -> Iterator[None]:
    """For failures that are meant: to find the smallest example takes most of their time."""
    yield from changed_profile(phases=[Phase.generate])


@pytest.fixture
def few_examples() -> Iterator[None]:
    """For what has its examples in another test."""
    yield from changed_profile(max_examples=3)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the whole session, so that a corpus is tokenized once."""
    cache = tmp_path_factory.mktemp("cache")
    before = os.environ.get("MANIFOLD_TYING_CACHE")
    os.environ["MANIFOLD_TYING_CACHE"] = str(cache)
    yield cache
    if before is None:
        del os.environ["MANIFOLD_TYING_CACHE"]
    else:
        os.environ["MANIFOLD_TYING_CACHE"] = before


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the runs of a file."""
    from training_runs import text  # which needs what training needs

    return text(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def process_environment() -> dict[str, str]:
    """Of processes that tests start: this package, loopback, one thread."""
    path = os.pathsep.join([str(Path(mt.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@pytest.fixture(scope="session")
def run_four_processes(process_environment: dict[str, str]) -> Callable[[str, Path], None]:
    """Run a program of this folder that forks into four processes, which write to the given one."""
    return partial(_run_four_processes, process_environment)


def _run_four_processes(environment: dict[str, str], name: str, folder: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name(name)), str(folder)]
    with (folder / "log").open("w+") as log:
        done = subprocess.run(command, env=environment, timeout=PATIENCE, stdout=log, stderr=log)
        log.seek(0)
        assert done.returncode == 0, log.read()[-10_000:]
