"""Tables of models in memory and on disk: ours and Hugging Face's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import _BERT, D, V, build, make
from safetensors.torch import load_file, save_file

import manifold_tying as mt
from manifold_tying.diagnostics import inspect_tables, interface_tables
from manifold_tying.training import Settings, TrainConfig, resolve
from manifold_tying.training.build import build_model, build_optimizer
from manifold_tying.training.saving import stage_checkpoint, write_checkpoint


@pytest.mark.parametrize("tied", [False, True])
def test_tables_of_a_hugging_face_model_are_what_it_computes_with(tied: bool) -> None:
    model = build(tie_word_embeddings=tied)
    E, W_out = interface_tables(model)
    assert E.shape == (V, D) and W_out.shape == (D, V) and not E.requires_grad and not W_out.requires_grad
    ids, hidden = torch.arange(V), torch.randn(3, D)
    assert torch.equal(model.get_input_embeddings()(ids), E)
    torch.testing.assert_close(model.get_output_embeddings()(hidden), hidden @ W_out)
    assert torch.equal(E.T, W_out) == tied


@pytest.mark.parametrize("model", [torch.nn.Linear(3, 2), build().model])
def test_tables_of_something_else(model: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match="get_output_embeddings"):
        interface_tables(model)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("interface", ["untied", "transpose", "pit-trainable", "pit-free"])
def test_a_run_is_read_as_the_model_it_saved(interface: Any, scaled: bool, tmp_path: Path) -> None:
    settings = Settings(steps=1, logit_scale=True if scaled and not interface.startswith("pit") else None)
    config = resolve(TrainConfig(out=tmp_path, interface=interface, settings=settings))
    model = build_model(config)
    optimizer = build_optimizer(model, config.settings)
    model.loss(torch.arange(16).view(2, 8), torch.arange(16).view(2, 8)).backward()
    optimizer.step()  # so that T is no identity
    older = stage_checkpoint(1, torch.nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)]), {})
    write_checkpoint(tmp_path, older)
    checkpoint = write_checkpoint(tmp_path, stage_checkpoint(2, model, optimizer, config.as_json()))
    expected = model.interface.materialize()
    for path in (tmp_path, checkpoint, str(checkpoint)):
        E, W_out, description = inspect_tables(path)
        assert torch.equal(E, expected[0]) and torch.equal(W_out, expected[1])
        assert "step 2" in description and interface.split("-")[0] in description
    if interface == "pit-trainable":  # the other diagonal map makes another T
        state = json.loads((checkpoint / "state.json").read_text())
        state["config"]["diagonal"] = "softplus"
        (checkpoint / "state.json").write_text(json.dumps(state))
        with pytest.raises(ValueError, match=r"expected the state of cholesky_factor\(diagonal='softplus'"):
            inspect_tables(tmp_path)


@pytest.mark.parametrize(("name", "shards"), [("Llama", True), ("GPT-2", False), ("GPTNeoX", True), ("OPT", False)])
def test_a_hugging_face_folder_is_read_as_the_model_it_saved(name: str, shards: bool, tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": False} if shards else {}
    model = make("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_BERT, **tied}) if name == "GPTNeoX" else build(name, **tied)
    model.save_pretrained(tmp_path, max_shard_size="1KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    E, W_out, description = inspect_tables(tmp_path)
    expected = interface_tables(model)
    assert torch.equal(E, expected[0]) and torch.equal(W_out, expected[1])
    assert model.config.model_type in description and description.endswith("untied" if shards else " tied")


def test_a_converted_model(tmp_path: Path) -> None:
    model = mt.convert(build())
    W = model.lm_head.weight.detach().double()
    model.save_pretrained(tmp_path)
    for tables in (interface_tables(model), inspect_tables(tmp_path)):
        torch.testing.assert_close(tables[0].double(), W @ torch.linalg.inv(W.T @ W), rtol=1e-4, atol=1e-6)
        assert torch.equal(tables[1].T, model.lm_head.weight)
    assert inspect_tables(tmp_path).description.endswith("PIT")


def test_a_tied_and_an_untied_llama(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    E, W_out, description = inspect_tables(tmp_path)
    assert torch.equal(E.T, W_out) and description.endswith(", tied")
    # exported from a tied model as two tables that differ: what is stored counts
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "lm_head.weight": torch.randn(V, D)}, tmp_path / "model.safetensors")
    assert inspect_tables(tmp_path).description.endswith("untied")


def test_damaged_folders(tmp_path: Path) -> None:
    def failing(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            inspect_tables(tmp_path)

    with pytest.raises(ValueError, match="expected the folder"):
        inspect_tables(tmp_path / "nowhere")
    failing("neither checkpoints/, state.json nor config.json")
    config = tmp_path / "config.json"
    config.write_text("[")
    failing(r"config.json is not JSON")
    config.write_text("[]")
    failing("expected a JSON object")
    config.write_text(json.dumps({"tie_word_embeddings": False}))
    failing("does not know the model")
    model = build(tie_word_embeddings=False)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    failing("safe_serialization")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"not safetensors")
    failing("cannot be read")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, weights)
    failing("the parts of the checkpoint in .* disagree.*lm_head.weight")
    save_file({**state, "lm_head.weight": torch.ones(4, 2)}, weights)
    failing("the parts of the checkpoint in .* disagree.*lm_head.weight")
    weights.unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}))
    failing("files of this folder")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}}))
    failing("model-1.safetensors cannot be read")
    (tmp_path / "state.json").write_text("{}")
    failing("it lacks step, config or files")
    (tmp_path / "state.json").write_text('{"step": 1, "config": {}, "files": {"model.safetensors": ""}}')
    failing("lacks files that its state.json names .model.safetensors")
    weights.write_bytes(b"damaged")
    failing("model.safetensors cannot be read")
    save_file({"interface.other": torch.ones(2)}, weights)
    failing("expected a token interface of this package")
