"""The examples of docs/diagnostics.md run as they stand."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import manifold_tying as mt
from manifold_tying import models
from manifold_tying.training._checkpoint import save_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "diagnostics.md"


def code_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def save_run(run: Path, interface: mt.TokenInterface) -> None:
    """What `make ablation` leaves, but for the training."""
    shape = dataclasses.replace(models.preset("nano"), embedding_norm=isinstance(interface, mt.PIT))
    model = models.Llama(shape, interface)
    save_checkpoint(run, 180, model, torch.optim.SGD(model.parameters()), {"diagonal": "exp"})


def test_the_page_runs_after_an_ablation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds: dict[str, Any] = {
        "untied-0": mt.Untied(4096, 128),
        "transpose-0": mt.TransposeTying(4096, 128),
        "transpose-1": mt.TransposeTying(4096, 128),
        "pit-frozen-0": mt.PIT(4096, 128, diagonal="exp"),
        "pit-trainable-0": mt.PIT(4096, 128, memory="trainable", diagonal="exp"),
    }
    for run, interface in kinds.items():
        save_run(tmp_path / "runs" / "ablation" / run, interface)
    page = "".join(code_blocks())
    assert page.count('prepare("stdlib"') == 1  # a smaller corpus does here: the tests themselves
    page = page.replace('"stdlib"', repr(f"text:{ROOT / 'tests'}"))
    names: dict[str, Any] = {}
    exec(compile(page, str(PAGE), "exec"), names)
    assert names["consistency"]["pit-trainable"].delta_ti < 1e-4 < names["consistency"]["transpose"].delta_ti
    assert (tmp_path / "traces.png").read_bytes().startswith(b"\x89PNG")
    assert "67108864000" in capsys.readouterr().out
