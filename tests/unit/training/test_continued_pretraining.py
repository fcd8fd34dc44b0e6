"""Runs that go on from a transformers checkpoint, against what transformers computes with it."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_models import build, difference, logits
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from training_runs import lines, stop_at
from transformers import AutoModelForCausalLM

import manifold_tying as mt
from manifold_tying.linalg import polar
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.parametrizations import parametrized
from manifold_tying.training import Settings, TrainConfig, load_model, resolve, train
from manifold_tying.training.build import build_model, build_optimizer, clipped_parameters
from manifold_tying.training.commands import ExportConfig, run_export
from manifold_tying.training.data import Batches, open_tokens, prepare
from manifold_tying.training.run_data import load_data
from manifold_tying.training.sections import Interface
from manifold_tying.training.split_table import SplitTable
from manifold_tying.tying import PITEmbedding

V, D, N = 300, 16, 16
TINY: dict[str, Any] = {"vocab_size": V, "pad_token_id": None}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A tied Llama, untrained, with the tokenizer of the corpus and an uneven gain before the head."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = build(**TINY)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.9, 1.1, D))
    model.save_pretrained(folder)
    made = open_tokens(prepare(f"text:{corpus}", vocab_size=V, cache=folder.parent / "cache"))
    (folder / "tokenizer.json").write_bytes((made.directory / "tokenizer.json").read_bytes())
    return folder


def run(out: Path, source: Path, corpus: Path, interface: Interface = "pit-trainable", **changes: Any) -> TrainConfig:
    values = {
        "init_from": source, "data": f"text:{corpus}", "steps": 6, "batch_size": 4, "sequence_length": N,
        "val_tokens": 128, "eval_every": 3, "lr": 2e-3, **changes,
    }  # fmt: skip
    return TrainConfig(out=out, interface=interface, settings=Settings(**values))


def with_tokenizer(folder: Path, source: Path) -> Path:
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return folder


def first_batch(config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = load_data(resolve(config)).train
    return Batches(tokens, batch_size=4, sequence_length=N, seed=0).batch(0)


def test_each_arm_starts_where_transformers_says(tmp_path: Path, source: Path, corpus: Path) -> None:
    ids, targets = first_batch(run(tmp_path, source, corpus))
    whole = torch.cat([ids, targets[:, -1:]], 1)  # transformers shifts the labels itself
    expected = mt.conversion_losses(AutoModelForCausalLM.from_pretrained(source), {"input_ids": whole})

    def start(name: str, interface: Interface, **changes: Any) -> float:
        train(run(tmp_path / name, source, corpus, interface, steps=1, **changes))
        return lines(tmp_path / name)[0]["loss"]

    assert start("transpose", "transpose") == pytest.approx(expected["source"], rel=1e-6)
    assert start("untied", "untied") == pytest.approx(expected["source"], rel=1e-6)
    found = [expected["source"]]
    for transform in ("identity", "head", "embedding"):
        found.append(start(transform, "pit-trainable", init_transform=transform))
        assert found[-1] == pytest.approx(expected[transform], rel=1e-5)
    assert start("free", "pit-free") == pytest.approx(expected["head"], rel=1e-5)
    assert len({round(loss, 4) for loss in found}) == 4


def test_rotation_keeps_the_function_where_the_last_gain_is_even(tmp_path: Path, corpus: Path, source: Path) -> None:
    ids = torch.randint(3, V, (4, 12), generator=torch.Generator().manual_seed(1))

    def error(gain: torch.Tensor, interface: Interface = "pit-trainable", transform: str = "rotation") -> float:
        folder = tmp_path / f"checkpoint-{gain.std():.3f}"
        model = build(**TINY, attention_bias=True, mlp_bias=True)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:  # gains and biases that count
                    parameter.uniform_(0.5, 1.5)
                if name == "model.norm.weight":
                    parameter.copy_(gain)
        model.save_pretrained(folder)
        with_tokenizer(folder, source)
        started = build_model(resolve(run(tmp_path, folder, corpus, interface, init_transform=transform)))
        E, W_out = (table.double() for table in started.interface.materialize())
        assert torch.linalg.matrix_norm(W_out @ E - torch.eye(D, dtype=torch.float64)) < 1e-4
        with torch.no_grad():
            return difference(started(ids).float(), logits(model, ids))

    even = torch.full((D,), 1.3)
    assert error(even) < 1e-4 and error(even, "pit-frozen") < 1e-4
    assert error(even, transform="head") > 0.02
    uneven = torch.linspace(0.9, 1.1, D)
    assert 1e-3 < error(uneven) < 0.5 * error(uneven, transform="head")


@pytest.mark.parametrize("family", ["Qwen3", "Granite"])
def test_rotation_of_each_family(family: str) -> None:
    """Their last gains are 1 before training."""
    model = build(family)
    before = logits(model)
    assert difference(logits(mt.convert(model, transform="rotation")), before) < 1e-4
    assert difference(logits(mt.convert(build(family))), before) > 1e-2


@pytest.mark.parametrize("family", ["GPT-2", "Gemma 3"])
def test_rotation_refuses_other_blocks_and_leaves_them(family: str) -> None:
    model = build(family)
    before = logits(model)
    with pytest.raises(ValueError, match="expected Llama-like blocks"):
        mt.convert(model, transform="rotation")
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(("interface", "changes"), [("pit-trainable", {}), ("pit-free", {"lora_rank": 2})])
def test_resumed_run_equals_uninterrupted_run(
    interface: Interface, changes: dict[str, Any], tmp_path: Path, source: Path, corpus: Path
) -> None:
    whole = run(tmp_path / "whole", source, corpus, interface, checkpoint_every=2, **changes)
    train(whole)
    parts = dataclasses.replace(whole, out=tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        train(parts, observer=stop_at(5))
    train(dataclasses.replace(parts, resume=True))
    for name in ("metrics.jsonl", "checkpoints/step-00000006/model.safetensors", "model/model.safetensors"):
        assert (whole.out / name).read_bytes() == (parts.out / name).read_bytes()


def test_a_run_does_not_go_on_from_another_checkpoint(tmp_path: Path, source: Path, corpus: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    config = run(tmp_path / "run", folder, corpus, "transpose", steps=2, eval_every=2)
    train(config)
    weights, shape = (folder / name for name in ("model.safetensors", "config.json"))
    before = weights.read_bytes()
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"started from another checkpoint than .*source is now: weights_sha256 differ"
    ):
        train(dataclasses.replace(config, resume=True))
    load_model(config.out)  # which reads no weights of the folder
    weights.write_bytes(before)
    train(dataclasses.replace(config, resume=True))
    shape.write_text(json.dumps({**json.loads(shape.read_text()), "rms_norm_eps": 0.1}))
    with pytest.raises(ValueError, match=r"config_sha256 differ.*Restore the checkpoint"):
        train(dataclasses.replace(config, resume=True))
    with pytest.raises(ValueError, match=r"source/config.json is not the one that the run .* started from; restore it"):
        load_model(config.out)
    shape.unlink()
    with pytest.raises(ValueError, match=r"source/config.json does not exist"):
        load_model(config.out)


@pytest.mark.parametrize("interface", ["transpose", "pit-trainable", "pit-free"])
def test_what_is_written_is_what_was_trained(
    interface: Interface, tmp_path: Path, source: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "tokenizer_files").mkdir(exist_ok=True)  # is no file to be copied
    config = run(tmp_path / "run", source, corpus, interface, init_transform="rotation")
    row = train(config)
    written = tmp_path / "run/model"
    model = mt.load(written) if interface.startswith("pit") else AutoModelForCausalLM.from_pretrained(written)
    assert (written / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert isinstance(model.get_input_embeddings(), PITEmbedding) == interface.startswith("pit")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied
    tokens = load_data(resolve(config)).val
    whole = torch.as_tensor(tokens[: 128 + 1].astype("int64"))
    ids, targets = whole[:-1].view(-1, N), whole[1:].view(-1, N)
    labels = torch.cat([ids, targets[:, -1:]], 1)
    assert model(input_ids=labels, labels=labels).loss.item() == pytest.approx(row["val_loss"], rel=1e-5)
    assert difference(logits(load_model(tmp_path / "run"), ids), logits(model, ids)) < 1e-6
    assert (row["defect"] is None) != interface.startswith("pit")
    if interface.startswith("pit"):
        assert row["defect"] <= 1e-6 and row["delta_ti"] < 1e-3 and row["cond_transform"] > 1
        mt.export(model, tmp_path / "exported")
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
        assert difference(logits(stock, ids), logits(model, ids)) < 1e-5
    else:
        assert row["delta_ti"] > 1
    monkeypatch.chdir(config.out / "checkpoints")
    for saved in (config.out, Path("step-00000006")):
        with pytest.raises(ValueError, match=r"A run with init_from has it in its folder model"):
            run_export(ExportConfig(saved, tmp_path / "file"), Console())
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("interface", ["untied", "pit-trainable", "pit-free"])
def test_low_rank_updates_are_merged_and_touch_nothing_else(
    interface: Interface, tmp_path: Path, source: Path, corpus: Path
) -> None:
    row = train(run(tmp_path / "run", source, corpus, interface, lora_rank=2, lr=2e-2, transform_lr=1e-2))
    ids = torch.arange(12).view(1, 12)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert difference(logits(load_model(tmp_path / "run"), ids), logits(merged, ids)) < 1e-5
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "run/model"))
    matrices = {name for name in before if name.endswith("_proj.weight")}
    pit, table = interface.startswith("pit"), "model.embed_tokens.weight"
    assert set(after) - {"lm_head.weight"} == set(before)
    moved = matrices | ({table} if pit else set())
    assert {name for name in before if not torch.equal(before[name], after[name])} == moved
    shapes = [before[name].shape for name in matrices]
    trained = sum(2 * (rows + columns) for rows, columns in shapes)
    trained += V * D if pit else 0
    trained += D * D if interface == "pit-trainable" else 0
    assert row["trainable_parameters"] == trained
    if pit:
        assert row["defect"] <= 1e-6
        mt.load(tmp_path / "run/model")


def test_memory_and_transform_have_their_own_rates_and_no_decay(tmp_path: Path, source: Path, corpus: Path) -> None:
    config = resolve(
        run(tmp_path, source, corpus, weight_decay=0.1, memory_lr=3e-4, transform_lr=7e-4, retraction="cayley")
    )
    model = build_model(config)
    optimizer = build_optimizer(model, config.settings)
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    of = {name: group_of[p] for name, p in model.named_parameters() if p.requires_grad}
    memory = next(group for name, group in of.items() if "memory" in name)
    factor = next(group for name, group in of.items() if "cholesky_factor" in name)
    assert (memory["lr"], memory["weight_decay"]) == (3e-4, 0.0)
    assert optimizer._manifolds[memory["params"][0]].retraction == "cayley"
    assert (factor["lr"], factor["weight_decay"]) == (7e-4, 0.0)
    weights = {name: group["weight_decay"] for name, group in of.items()}
    assert all(decay == (0.1 if name.endswith("_proj.weight") else 0.0) for name, decay in weights.items())
    assert not any(p.shape == (V, D) for p in clipped_parameters(model))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """The source as `manifold-tying convert` leaves it."""
    folder = tmp_path_factory.mktemp("converted")
    mt.save(mt.convert(AutoModelForCausalLM.from_pretrained(source), transform="rotation"), folder)
    return with_tokenizer(folder, source)


@pytest.mark.parametrize(
    ("interface", "changes"), [("pit-trainable", {}), ("pit-frozen", {"lora_rank": 2}), ("pit-free", {})]
)
def test_converted_checkpoint_is_gone_on_with(
    interface: Interface, changes: dict[str, Any], tmp_path: Path, converted: Path, corpus: Path
) -> None:
    config = run(tmp_path / "run", converted, corpus, interface, **changes)
    ids, targets = first_batch(config)
    expected = F.cross_entropy(logits(mt.load(converted), ids).flatten(0, 1), targets.flatten()).item()
    row = train(config)
    assert lines(tmp_path / "run")[0]["loss"] == pytest.approx(expected, rel=1e-5)
    before, after = (load_file(folder / "model.safetensors") for folder in (converted, tmp_path / "run/model"))
    assert set(after) == set(before)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    gains = set() if changes else {name for name in before if name.endswith("norm.weight")}
    assert moved == gains | {name for name in before if name.endswith(("_proj.weight", "embed_tokens.weight"))}
    memories = [polar(tensors["model.embed_tokens.weight"].double())[0] for tensors in (before, after)]
    assert (difference(*memories) > 1e-4) == (interface != "pit-frozen")  # its Z stays
    assert row["defect"] <= 1e-6 and row["delta_ti"] < 1e-3
    described = json.loads((tmp_path / "run/model/config.json").read_text())
    assert described["manifold_tying"] == {"scale": 1.0, "rotated": True}
    again = run(tmp_path / "again", tmp_path / "run/model", corpus, "pit-frozen", steps=1)
    assert train(again)["val_loss"] == pytest.approx(row["val_loss"], rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "mini"}, "preset cannot be set with init_from"),
        ({"init_transform": "hat"}, "unknown init_transform 'hat'; choose one of identity, head"),
        ({"init_from": None, "lora_rank": 4}, "lora_rank needs init_from"),
        ({"sequence_length": 65}, "expected sequence_length <= 64"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str, tmp_path: Path, source: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(run(tmp_path / "out", source, corpus, **changes))


def test_bad_checkpoints(tmp_path: Path, source: Path, corpus: Path) -> None:
    def refused(message: str, folder: Path, interface: Interface = "transpose", **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            train(run(tmp_path / "out", folder, corpus, interface, **changes))
        assert not (tmp_path / "out").exists()

    refused("config.json does not exist", tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((source / "config.json").read_text())
    refused("expected weights as safetensors", empty)
    (empty / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    refused(r"tokenizer.json does not exist", empty)
    (empty / "tokenizer.json").write_text(Tokenizer.from_file(str(source / "tokenizer.json")).to_str() + "x")
    refused(r"is not a tokenizer.json", empty)
    lost = "model.layers.0.mlp.up_proj.weight"
    partial = shutil.copytree(source, tmp_path / "partial")
    tensors = load_file(partial / "model.safetensors")
    del tensors[lost]
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    refused(f"{lost}.*randomly initialized", partial)
    build(**TINY, tie_word_embeddings=False).save_pretrained(tmp_path / "untied")
    refused("different tables", with_tokenizer(tmp_path / "untied", source))
    converted = tmp_path / "converted"
    mt.save(mt.convert(build(**TINY)), converted)
    with_tokenizer(converted, source)
    refused("is already converted: .* transpose starts from a table .*Choose a PIT interface", converted)
    refused("^init_transform cannot be set", converted, "pit-frozen", init_transform="rotation")
    (converted / "config.json").write_text((converted / "config.json").read_text().replace(" true", " false"))
    refused("has both manifold_tying and tie_word_embeddings=false", converted, "pit-frozen")


def test_rotation_scales_move_a_table_evenly() -> None:
    """As Adam does a tied table: every column by the same length, where one rate for all is off by the condition number."""

    def moved(scaled: bool) -> tuple[torch.Tensor, float]:
        model = build(**TINY)
        with torch.no_grad():
            table = model.get_input_embeddings().weight
            table.copy_(table @ torch.diag(torch.logspace(-1, 1, D)))  # singular values over a factor of a hundred
            model.model.norm.weight.fill_(1.3)
        split = SplitTable(mt.convert(model, transform="rotation"), memory="trainable", diagonal="exp")
        overrides = split.rotation_scales(model) if scaled else {}
        optimizer = RiemannianAdam(param_groups(model, manifold_lr=1e-4, overrides=overrides), lr=1e-4)
        interface, gain = split.interface, model.model.norm.weight.detach().clone()
        before, T = interface.materialize()[0].detach(), interface.transform.detach()
        ids = torch.randint(V, (8, 12), generator=torch.Generator().manual_seed(1))
        model(input_ids=ids, labels=ids).loss.backward()
        parametrized(interface)["cholesky_factor"].original.grad = None  # the memory alone
        optimizer.step()
        assert torch.equal(interface.transform, T)
        lengths = (interface.materialize()[0] - before).norm(dim=0)
        return lengths, ((model.model.norm.weight - gain) / gain).abs().max().item()

    even, gain = moved(scaled=True)
    uneven, stuck = moved(scaled=False)
    assert even.max() / even.min() < 5 < 30 < uneven.max() / uneven.min()
    assert gain == pytest.approx(1e-4 / 1.3, rel=1e-2) and stuck > 10 * gain  # 1e-4 of g, whatever Λ² it carries


def test_rotation_scales_are_for_rotated_models(tmp_path: Path) -> None:
    model = mt.convert(build(**TINY), transform="rotation")
    mt.save(model, tmp_path / "saved")
    loaded = mt.load(tmp_path / "saved")
    expected, found = mt.huggingface.rotation_scales(model), mt.huggingface.rotation_scales(loaded)
    assert list(found) == list(expected) and len(found) == 2
    assert all(torch.equal(found[name]["scale"], expected[name]["scale"]) for name in found)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="transform='rotation'; other models need no scales"):
        mt.huggingface.rotation_scales(mt.convert(build(**TINY)))
