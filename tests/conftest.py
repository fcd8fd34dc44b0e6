"""What every test gets: one thread, a fixed seed, and no access to the user's cache of corpora."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Tests are small; more threads would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


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
