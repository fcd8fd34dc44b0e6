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


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_saved_file_computes_what_it_did(version: str, name: str) -> None:
    expected = load_file(FOLDER / version / "expected.safetensors")
    if name not in expected:
        pytest.skip(f"{version} did not have this format")
    found = FORMATS[name].load(FOLDER / version / name.replace(" ", "-"))
    torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4)
