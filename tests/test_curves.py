"""Curves of ablations as numbers and as a figure."""

import json
from pathlib import Path

import numpy as np
import pytest
from training_runs import config, lines, text

from benchmarks.curves import main
from manifold_tying.training import AblateConfig, ablate


def test_curves_are_means_over_seeds(tmp_path: Path) -> None:
    shared = config(tmp_path, text(tmp_path)).settings
    folder = tmp_path / "runs"
    ablate(AblateConfig(out=folder, arms="transpose+lr=0.002,pit-trainable", seeds=2, settings=shared))
    out, figure = tmp_path / "curves.json", tmp_path / "figures/curves.svg"
    command = [str(folder), str(folder), "--out", str(out), "--figure", str(figure)]
    main([*command, "--quantities", "loss", "val_loss", "delta_ti"])
    first, second = json.loads(out.read_text())
    assert first == second and first["folder"] == "runs" and len(first["summary"]) == 4
    for arm in ("transpose+lr=0.002", "pit-trainable"):
        runs = [lines(folder / f"{arm}-{seed}") for seed in (0, 1)]
        measured = np.array([[line["val_loss"] for line in run if "val_loss" in line] for run in runs])
        kept = first["curves"]["val_loss"][arm]
        assert kept["mean"] == pytest.approx(measured.mean(0), rel=1e-5)
        assert kept["low"] == pytest.approx(measured.min(0), rel=1e-5) and kept["high"] != kept["low"]
        assert kept["tokens"] == [80 * step for step in (4, 8, 12)]
        assert len(first["curves"]["loss"][arm]["mean"]) == 12
    drawn = figure.read_text()
    assert drawn.count("<!-- transpose -->") == drawn.count("<!-- pit-trainable -->") == 6  # once per panel
    before = figure.read_bytes()
    main(command)
    assert figure.read_bytes() == before
