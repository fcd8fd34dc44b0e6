"""POET bodies in training: arms, rates, resumption around merges, and what is recorded of the weights."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import few_chunks
from training_runs import SHAPE, config, lines, stop_at

from manifold_tying import diagnostics
from manifold_tying.poet import equivalences
from manifold_tying.training import AblateConfig, Settings, TrainConfig, ablate, checkpoints, resolve, train
from manifold_tying.training.build import build_merges, build_model, build_optimizer
from manifold_tying.training.probes import Probes
from manifold_tying.training.report import load_experiment, write_report

KINDS = [f"attention.{n}" for n in ("query", "key", "value", "output")] + [f"mlp.{n}" for n in ("gate", "up", "down")]


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training_runs.SHAPE", dataclasses.replace(SHAPE, num_layers=1))


def settings(corpus: Path, **changes: Any) -> Settings:
    values = {"batch_size": 4, "block_size": 6, "body_lr": 4e-3, "checkpoint_every": None, **changes}
    return config(corpus, corpus, **values).settings


def test_resumed_before_and_at_a_merge_equals_uninterrupted(tmp_path: Path, corpus: Path) -> None:
    """A checkpoint at every step; stopped before and at the merge at 4."""
    shared = settings(corpus, body="poet-full", checkpoint_every=1, eval_every=3, steps=6)
    whole = TrainConfig(out=tmp_path / "whole", interface="untied", settings=shared)
    train(whole)
    for stop in (3, 4):
        parts = dataclasses.replace(whole, out=tmp_path / str(stop))
        with pytest.raises(KeyboardInterrupt):
            train(parts, observer=stop_at(stop + 1))
        assert checkpoints(parts.out)[-1].name == f"step-{stop:08d}"
        train(dataclasses.replace(parts, resume=True))
        for file in ("metrics.jsonl", "probes.jsonl", "checkpoints/step-00000006/model.safetensors"):
            assert (parts.out / file).read_bytes() == (whole.out / file).read_bytes(), f"{file} after a stop at {stop}"


def test_finished_run_without_a_result_gives_the_same_row(tmp_path: Path, corpus: Path) -> None:
    """Killed between the last checkpoint and the row: nothing is measured again, so what a merge cleared is still known."""
    run = TrainConfig(out=tmp_path / "run", interface="untied", settings=settings(corpus, body="poet-block"))
    row = train(run)
    assert row["arm"] == "untied+body=poet-block" and row["orthogonality_error"] > 0
    again = train(dataclasses.replace(run, resume=True))
    same = set(row) - {"peak_memory_bytes", "seconds", "tokens_per_second"}
    assert {key: again[key] for key in same} == {key: row[key] for key in same}


@pytest.mark.parametrize("body", ["poet-block", "poet-full"])
def test_probes_follow_the_rotations_over_merges(body: str, tmp_path: Path, corpus: Path) -> None:
    """W = R W0 P with the R and P that the probes accumulated, although W0 was merged twice."""
    given = settings(corpus, body=body, steps=10, cayley_terms=2)
    run = resolve(TrainConfig(out=tmp_path / "run", interface="untied", settings=given))
    model = build_model(run)
    optimizer = build_optimizer(model, run.settings)
    schedule = build_merges(model, optimizer, run.settings)
    assert schedule is not None
    probes = Probes(model, schedule)
    parts = {path.removesuffix(".weight"): (part, stored) for path, part, stored in equivalences(model)}
    names = [f"blocks.1.{kind}" for kind in KINDS]
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    first = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    largest = 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        with torch.no_grad():
            for _, stored in parts.values():
                stored += 0.02 * torch.randn(stored.shape, generator=generator)
        for part, stored in parts.values():
            for (blocks, _), n in zip(part.sides(stored), part.base.shape, strict=True):
                residuals = [(G.double() @ G.double().mT - torch.eye(G.shape[-1])).square().sum() for G in blocks]
                largest = max(largest, (sum(residuals, torch.zeros(())) / n).sqrt().item())
        probes.step()
        schedule.step()
    looked = probes.measure()
    assert looked["orthogonality_error"] == pytest.approx(largest, rel=1e-6) and largest > 1e-5
    assert list(looked["weights"]) == names
    for name in names:
        found, (R, P) = looked["weights"][name], probes._turned(name)
        W = layers[name].weight.detach()
        assert torch.allclose(R @ first[name] @ P, W, atol=1e-5)
        assert not torch.allclose(R @ first[name], W, atol=1e-2)  # the negative control: P is needed, and so is R
        assert found["R"]["vector"] == pytest.approx(diagnostics.vector_probe(R).item(), abs=1e-12)
        assert found["P"]["trace"] == pytest.approx((torch.trace(P) / len(P)).item(), abs=1e-6)
        assert found["R"]["trace"] < 0.999
        sigma = torch.linalg.svdvals(W.double())
        values = found["singular_values"]
        assert [values[0], values[-1]] == pytest.approx([sigma[-1].item(), sigma[0].item()], rel=1e-6)
        assert found["svd_entropy"] == pytest.approx(diagnostics.svd_entropy(W).item())
    assert probes.measure()["orthogonality_error"] <= largest  # since the last look, in which nothing was merged


def test_skew_vectors_have_their_rate_and_no_decay(tmp_path: Path, corpus: Path) -> None:
    given = settings(corpus, body="poet-block", weight_decay=0.1, body_lr=2e-3)
    run = resolve(TrainConfig(out=tmp_path, interface="pit-trainable", settings=given))
    model = build_model(run)
    optimizer = build_optimizer(model, run.settings)
    of = {p: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    rates = {name: of[p] for name, p in model.named_parameters()}
    skew = {name for name in rates if name.endswith("parametrizations.weight.original")}
    assert len(skew) == 2 * len(KINDS)
    assert {rates[name] for name in skew} == {(2e-3, 0.0)}
    assert rates["norm.weight"] == (4e-3, 0.0)
    assert rates["interface.parametrizations.cholesky_factor.original"][0] == 5 * 4e-3
    matrices = {name for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim > 1}
    assert not matrices  # W0 is a buffer; the same seed draws the same one, another seed another
    drawn = [
        build_model(dataclasses.replace(run, seed=seed)).state_dict()[
            "blocks.0.mlp.up.parametrizations.weight.0.ordered_base"
        ]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("preset", "values", "expected"),
    [  # POET, tables 9 and 10
        ("poet-60m", {"body": "poet-block"}, (256, 400, 1e-3)),
        ("poet-60m", {"body": "poet-block", "block_size": 128}, (128, 400, 2e-3)),
        ("poet-60m", {"body": "poet-full", "fraction": 0.125}, (None, 400, 4e-3)),
        ("nano", {"body": "poet-block", "steps": 180}, (64, 60, 4e-3)),
        ("mini", {"body": "poet-block", "steps": 7, "merge_every": 3, "body_lr": 0.5}, (128, 3, 0.5)),
        ("nano", {"body": "poet-block", "block_size": 256}, (256, 400, 2e-3)),  # in a width of 128
        ("nano", {"body": "adamw"}, (None, None, None)),
    ],
)
def test_recipe_of_the_paper(preset: str, values: dict[str, Any], expected: tuple[Any, ...]) -> None:
    given = Settings(**{"preset": preset, "steps": 300_000, **values})
    found = resolve(TrainConfig(out=Path("x"), interface="untied", settings=given)).settings
    assert (found.block_size, found.merge_every, found.body_lr) == pytest.approx(expected)


# torch 2.13's own way of tracing an autograd.Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("one_layer")
def test_a_compiled_run_has_the_same_losses_across_a_merge(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a trainable memory, too. Without a compiler: the capture of the graphs is what can go wrong on our side."""
    few_chunks(monkeypatch)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: real(f, backend="eager"))
    losses = {}
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        shared = settings(corpus, body="poet-block", block_size=16, compile=compiled, steps=2, merge_every=1)
        train(TrainConfig(out=out, interface="pit-trainable", settings=shared))
        losses[compiled] = [line["loss"] for line in lines(out)]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_ablation_of_bodies_and_its_report(tmp_path: Path, corpus: Path) -> None:
    arms = "adamw,poet-full,pit-trainable+body=poet-block"
    out = tmp_path / "out"
    shared = settings(corpus, steps=4, merge_every=2, eval_every=2)
    rows = ablate(AblateConfig(out=out, arms=arms, seeds=1, settings=shared))
    assert [row["arm"] for row in rows] == arms.split(",")
    assert [row["orthogonality_error"] is None for row in rows] == [True, False, False]
    trainable = {row["arm"]: row["trainable_parameters"] for row in rows}
    assert trainable["poet-full"] < trainable["adamw"]
    described = json.loads((out / "experiment.json").read_text())
    assert described["arms"]["poet-full"]["body"] == "poet-full"
    assert described["arms"]["adamw"]["body_lr"] is None
    page = write_report(load_experiment(out), out).read_text()
    for name in ("singular-values", "hyperspherical-energy", "orthogonality-error"):
        assert f'id="figure-{name}"' in page
    assert "Δ<br>to" not in page and "to adamw" in page.replace("\N{NO-BREAK SPACE}", " ").replace("<br>", " ")
    with (out / "adamw-0/probes.jsonl").open("a") as file:
        file.write('{"step": 99, "tokens": 9, "weights": {"blocks.1.mlp.up": {"svd_entropy": "high"}}}\n')
    with pytest.raises(ValueError, match=r"probes\.jsonl, line 4, blocks\.1\.mlp\.up: expected a number under"):
        load_experiment(out)
