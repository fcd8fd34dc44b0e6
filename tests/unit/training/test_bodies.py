"""Bodies beside AdamW and POET: what is kept, which rule moves what, and resumption."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_runs import config, stop_at

from manifold_tying import linalg
from manifold_tying.training import TrainConfig, load_model, resolve, train
from manifold_tying.training.build import build_model, build_optimizer

KINDS = ("attention.query", "attention.key", "mlp.up", "mlp.down")


def run_of(out: Path, corpus: Path, body: str, interface: Any = "untied", **changes: Any) -> TrainConfig:
    return resolve(config(out, corpus, interface, body=body, steps=6, checkpoint_every=3, **changes))


def weights(model: Any) -> dict[str, Tensor]:
    return {kind: model.get_submodule(f"blocks.1.{kind}").weight.detach() for kind in KINDS}


@pytest.mark.parametrize("body", ["muon", "hyperball", "stiefel", "stiefel-muon", "isospectral"])
def test_bodies_keep_what_they_promise_and_move(body: str, tmp_path: Path, corpus: Path) -> None:
    run = run_of(tmp_path / "run", corpus, body)
    before = weights(build_model(run))
    assert train(run)["arm"] == f"untied+body={body}"
    for kind, W in weights(load_model(run.out)).items():
        start = before[kind]
        assert (W - start).norm() > 0.01 * start.norm()
        if body.startswith("stiefel"):
            assert linalg.defect(W) < 1e-6
        elif body == "hyperball":
            torch.testing.assert_close(W.norm(), start.norm(), rtol=1e-6, atol=0)
        elif body == "isospectral":
            torch.testing.assert_close(torch.linalg.svdvals(W), torch.linalg.svdvals(start), rtol=1e-5, atol=1e-7)


MUON = ["muon", "hyperball", "stiefel-muon"]


@pytest.mark.parametrize("body", ["adamw", *MUON, "stiefel", "isospectral"])
@pytest.mark.parametrize("memory_rule", ["adam", "muon"])
def test_muon_moves_what_was_asked_for_at_its_rate(body: str, memory_rule: str, tmp_path: Path, corpus: Path) -> None:
    rates: dict[str, Any] = {} if body == "adamw" else {"body_lr": 0.123}
    run = run_of(tmp_path, corpus, body, "pit-trainable", memory_rule=memory_rule, memory_lr=0.456, **rates)
    model = build_model(run)
    optimizer = build_optimizer(model, run.settings)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for p in names:
        p.grad = torch.ones_like(p)
    optimizer.step()
    found = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    by_muon = {names[p] for p, state in optimizer.state.items() if "momentum_buffer" in state}
    memory = {name for name in names.values() if name.endswith("memory.original")}
    matrices = {
        name for name in names.values() if name.startswith("blocks.") and dict(model.named_parameters())[name].ndim == 2
    }
    assert len(memory) == 1 and len(matrices) >= 14
    assert by_muon == (memory if memory_rule == "muon" else set()) | (matrices if body in MUON else set())
    assert all(found[name] == 0.456 for name in memory)
    assert all((found[name] == 0.123) == (body != "adamw") for name in matrices)
    assert all(found[name] not in (0.123, 0.456) for name in names.values() if name not in memory | matrices)


@pytest.mark.parametrize("body", ["adamw", "stiefel", "hyperball"])
def test_the_memorys_options_are_its_own(body: str, tmp_path: Path, corpus: Path) -> None:
    options = {"second_moment": "row", "project_every": 3}
    run = run_of(tmp_path, corpus, body, "pit-trainable", **options)
    optimizer = build_optimizer(build_model(run), run.settings)
    found = [{name: group[name] for name in options} for group in optimizer.param_groups]
    assert found.count(options) == 1 and all(
        of in (options, {"second_moment": "element", "project_every": 1}) for of in found
    )


def test_a_body_by_muon_resumes_bit_for_bit(tmp_path: Path, corpus: Path) -> None:
    whole = run_of(tmp_path / "whole", corpus, "stiefel-muon", "pit-trainable", memory_rule="muon")
    train(whole)
    parts = dataclasses.replace(whole, out=tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        train(parts, observer=stop_at(4))
    train(dataclasses.replace(parts, resume=True))
    for file in ("metrics.jsonl", "checkpoints/step-00000006/model.safetensors"):
        assert (parts.out / file).read_bytes() == (whole.out / file).read_bytes()
