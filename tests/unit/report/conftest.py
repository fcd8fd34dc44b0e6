"""What tests of the page share."""

import io

import pytest
from PIL import Image

from manifold_tying.training.report import _curves, _page
from manifold_tying.training.report._picture import Picture


@pytest.fixture
def without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pixel in place of every figure, for tests of what stands around them."""
    pixel = io.BytesIO()
    Image.new("RGB", (1, 1)).save(pixel, format="PNG")
    picture = Picture(png=pixel.getvalue(), svg="", width=1, height=1, panels=[])
    monkeypatch.setattr(_curves, "draw", lambda name, curves, looks, axis: picture)
    monkeypatch.setattr(_page, "write_figures", lambda figures, out: None)
