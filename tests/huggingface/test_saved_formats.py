"""Files that each version wrote are read by this one."""

import pytest
import torch
from safetensors.torch import load_file
from saved_formats import FOLDER, FORMATS

import manifold_tying as mt

VERSIONS = sorted(path.name for path in FOLDER.iterdir())
# PEFT reads a property that transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def test_this_version_is_recorded() -> None:
    assert mt.__version__ in VERSIONS, "run python tests/saved_formats.py"
    assert load_file(FOLDER / mt.__version__ / "expected.safetensors").keys() == FORMATS.keys()


@pytest.mark.parametrize(
    ("version", "name"),
    [(version, name) for version in VERSIONS for name in load_file(FOLDER / version / "expected.safetensors")],
)
def test_a_saved_file_computes_what_it_did(version: str, name: str) -> None:
    expected = load_file(FOLDER / version / "expected.safetensors")
    found = FORMATS[name].load(FOLDER / version / name.replace(" ", "-"))
    torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4)
