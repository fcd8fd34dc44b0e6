"""The planted defects of tests/breaks fit the code: each text occurs once, and its tests exist."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_break_can_be_made() -> None:
    for listed in ("core.toml", "application.toml"):
        for name, broken in tomllib.loads((ROOT / "tests/breaks" / listed).read_text(encoding="utf-8")).items():
            text = (ROOT / "manifold_tying" / broken["file"]).read_text(encoding="utf-8")
            assert text.count(broken["old"]) == 1, name
            assert all((ROOT / test.partition("::")[0]).exists() for test in broken["tests"]), name
