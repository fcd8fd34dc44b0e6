"""Hugging Face models: what a conversion keeps and refuses, checkpoints, exports, and the tools that run on them afterwards."""

import copy
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_models import FAMILIES, D, V, build, difference, ids, interface, logits, stays_as_it_was, turned
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import manifold_tying as mt
from manifold_tying.tying import PITEmbedding


def test_padding_rows_and_padded_vocabulary() -> None:
    model = build("Llama", vocab_size=128)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[0] = 0
        table[V:] = 0
    before = logits(model)
    mt.convert(model, transform="rotation")
    assert difference(logits(model), before) <= 1e-4
    assert not interface(model).memory[0].any() and not interface(model).memory[V:].any()
    found = []
    for tokens in ([0, 5], [5]):
        (gradient,) = torch.autograd.grad(
            model.get_input_embeddings()(torch.tensor(tokens)).sum(), model.lm_head.weight
        )
        found.append(gradient)
    torch.testing.assert_close(*found)  # the padding row's own lookup adds nothing


def test_an_embedding_that_does_more_is_refused() -> None:
    class Shifted(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    model = build()
    model.get_input_embeddings().__class__ = Shifted
    stays_as_it_was(model, "computes more")


def test_other_models_and_options_are_refused() -> None:
    stays_as_it_was(build(vocab_size=12), "V >= d")
    for option in ("transform", "source"):
        stays_as_it_was(build(), "unknown", **{option: "none"})
    stays_as_it_was(build(), "pit-trainable", memory="trainable")
    stays_as_it_was(build(), "transform='rotation'", bridge=True)
    stays_as_it_was(build(), "convert has no option tied", tied=True)
    limited = build()
    limited.get_input_embeddings().max_norm = 1.0
    stays_as_it_was(limited, "max_norm")
    stays_as_it_was(mt.convert(build()), "already converted")
    with pytest.raises(ValueError, match="PreTrainedModel"):
        mt.convert(nn.Linear(3, 3))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="converted by manifold_tying"):
        mt.save(build(), "nowhere")


@pytest.mark.parametrize("source", ["input", "output"])
def test_untied_tables_with_a_source(source: Any) -> None:
    model = build(tie_word_embeddings=False)
    side = model.get_input_embeddings() if source == "input" else model.get_output_embeddings()
    table = side.weight.detach().clone()
    with pytest.warns(UserWarning, match=source):
        mt.convert(model, source=source)
    assert torch.equal(model.lm_head.weight, table) and interface(model).table is model.lm_head.weight
    assert model.config.tie_word_embeddings


def test_conversion_losses_say_what_each_choice_costs() -> None:
    model = build().train()
    model.model.layers[0].eval()
    batch = {"input_ids": ids(), "labels": ids()}
    before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
    losses = mt.conversion_losses(model, batch)
    assert list(losses) == ["source", "identity", "head", "embedding", "rotation"]
    assert list(model.modules()) == modules and model.training and not model.model.layers[0].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for choice, loss in losses.items():
        twin = build()
        if choice != "source":
            mt.convert(twin, transform=choice)  # type: ignore[arg-type]
        assert twin(**batch).loss.item() == pytest.approx(loss, rel=1e-6)
    assert losses["rotation"] == pytest.approx(losses["source"], rel=1e-5)  # its last gain is 1
    assert losses["identity"] != pytest.approx(losses["source"], rel=1e-4)
    assert list(mt.conversion_losses(build("OPT"), batch)) == ["source", "identity", "head", "embedding"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_converted_saved_loaded_and_exported(family: str, tmp_path: Path) -> None:
    model = build(family)
    embedding, head, names = model.get_input_embeddings(), model.get_output_embeddings(), list(model.state_dict())
    table, stock, hidden = embedding.weight.detach().clone(), logits(model), torch.randn(3, D)
    scored, count = head(hidden), model.num_parameters(exclude_embeddings=True)
    assert mt.convert(model) is model and difference(logits(model), stock) > 1e-3
    assert model.get_input_embeddings() is embedding and model.get_output_embeddings() is head
    assert torch.equal(embedding.weight, table) and torch.equal(head(hidden), scored)  # T = H: the head stays
    assert list(model.state_dict()) == names and model.num_parameters(exclude_embeddings=True) == count
    E, W_out = interface(model).materialize()
    assert difference(W_out @ E, torch.eye(D)) <= 1e-5
    torch.testing.assert_close(embedding(ids()), embedding.scale * E[ids()], rtol=1e-4, atol=1e-6)
    before = logits(turned(model))
    mt.save(model, tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    assert {len(tensor) for tensor in load_file(file).values()} >= {V} and "lm_head.weight" not in load_file(file)
    loaded = mt.load(tmp_path / "saved")
    for twin in (loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        assert torch.equal(logits(twin), before) and interface(twin)
    stored = loaded.state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mt.export(loaded, tmp_path / "exported")
    assert any("assume tied" in str(w.message) for w in caught) == (family in ("Gemma 3", "Cohere"))
    reader: Any = AutoModelForCausalLM
    exported, report = reader.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(report.values()) and not exported.config.tie_word_embeddings
    assert type(exported.get_input_embeddings()) is type(build(family).get_input_embeddings())
    assert difference(logits(exported), before) <= 1e-5
    assert torch.equal(logits(model), before)


def test_every_way_of_building_the_model_again_divides(tmp_path: Path) -> None:
    model = turned(mt.convert(build()))
    model.save_pretrained(tmp_path / "plain")
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # as DeepSpeed and FSDP do
    model.save_pretrained(tmp_path / "gathered", state_dict=dict(gathered))
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    before, hidden = logits(model), model.model(ids()).last_hidden_state
    for folder in ("plain", "gathered", "shards"):
        assert torch.equal(logits(type(model).from_pretrained(tmp_path / folder)), before)
    for made in (type(model)(model.config), AutoModelForCausalLM.from_config(model.config)):
        made.load_state_dict(gathered)
        assert torch.equal(logits(made.eval()), before)
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "plain")(ids()).last_hidden_state, hidden)
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    assert torch.equal(other.model(ids()).last_hidden_state, hidden)
    with pytest.raises(ValueError, match="with a head on its vocabulary; save_pretrained keeps"):
        mt.save(other, tmp_path / "classifier")
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), before)


def test_exported_tables_are_computed_in_float64_and_cast_once(tmp_path: Path) -> None:
    model = turned(mt.convert(build())).to(torch.bfloat16)
    mt.export(model, tmp_path)
    W = model.lm_head.weight.detach().double().numpy()
    tables = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tables["lm_head.weight"], model.lm_head.weight)
    E = torch.tensor(W @ np.linalg.inv(W.T @ W))
    assert torch.equal(tables["model.embed_tokens.weight"], E.bfloat16())


def test_readers_that_do_not_know_us_fail(tmp_path: Path) -> None:
    model = mt.convert(build())
    mt.save(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "plain")  # as the Trainer does
    mt.export(model, tmp_path / "exported")
    program = (
        "import sys\nfrom transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM\n"
        "for kind in (AutoModel, AutoModelForCausalLM, LlamaForCausalLM):\n"
        "    for folder in sys.argv[1:]:\n"
        "        try:\n            kind.from_pretrained(folder)\n            print('loads')\n"
        "        except ValueError as error:\n            print('quant_method' in str(error))\n"
        "assert 'manifold_tying' not in sys.modules"
    )
    folders = [str(tmp_path / name) for name in ("saved", "plain", "exported")]
    done = subprocess.run([sys.executable, "-c", program, *folders], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "loads"] * 3
    described = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "manifold_tying" in described["quantization_config"]["note"]  # what a reader finds there
    assert (
        not {"manifold_tying", "quantization_config"}
        & json.loads((tmp_path / "exported/config.json").read_text()).keys()
    )


def test_importing_us_imports_nothing_slow_and_still_registers(tmp_path: Path) -> None:
    mt.save(mt.convert(build()), tmp_path)
    program = (
        "import sys, torch, warnings, manifold_tying as mt\n"
        "script, warns = torch.jit.script, lambda: warnings.warn('`torch.jit.script` is deprecated', FutureWarning)\n"
        "torch.jit.script = lambda *args, **options: (warns(), script(*args, **options))[1]  # as torch 2.14 does\n"
        "mt.PIT, mt.stiefel, mt.optim, mt.convert, mt.models, mt.diagnostics\n"
        "slow = {'torch._dynamo', 'scipy.stats', 'matplotlib', 'tensorboard', 'tokenizers', 'pandas', 'transformers', 'peft'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
        "from transformers import AutoModelForCausalLM\n"
        f"print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).get_input_embeddings()).__name__)\n"
        "from transformers import modeling_utils\n"
        "assert modeling_utils.__loader__ is modeling_utils.__spec__.loader, 'the import hook left its own loader behind'\n"
        "print(type(modeling_utils.__loader__).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["PITEmbedding", "SourceFileLoader"] and "jit.script" not in done.stderr


def test_transformers_refuses_checkpoints_whose_parts_disagree(tmp_path: Path) -> None:
    mt.save(mt.convert(build()), tmp_path)
    config = tmp_path / "config.json"
    described = json.loads(config.read_text())
    mark = described["manifold_tying"]
    wrong: list[dict[str, Any]] = [{"manifold_tying": mark | {"scale": 0}}, {"manifold_tying": {}}]
    for change in ({"tie_word_embeddings": False}, *wrong):
        config.write_text(json.dumps(described | change))
        with pytest.raises(ValueError, match="manifold_tying"):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_conversion_in_inference_mode_can_be_trained() -> None:
    model = build()
    with torch.inference_mode():
        mt.convert(model, transform="identity")
    model(ids(), labels=ids()).loss.backward()
    assert model.lm_head.weight.grad.any()


def test_writes_to_the_weight_and_its_flag_count() -> None:
    model = mt.convert(build())
    known, new = 7, 9
    for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        table.data[new] = table.data[known]
    found = logits(model)
    torch.testing.assert_close(found[..., new], found[..., known])
    E = model.get_input_embeddings()(torch.tensor([known, new]))
    torch.testing.assert_close(E[0], E[1])
    model.get_input_embeddings().weight.requires_grad = False
    model(ids(), labels=ids()).loss.backward()
    assert model.lm_head.weight.grad is None


def test_constrained_bodies_are_exported_as_plain_weights_and_not_saved(tmp_path: Path) -> None:
    model = mt.convert(build())
    mt.materialize(model)  # nothing of it is constrained
    assert interface(model)
    mt.orthogonal(model.get_submodule("model.layers.0.self_attn.q_proj"))
    taken, _ = mt.equivalence_(model, include="*.mlp.*", block_size=8, verbose=False)
    assert len(taken) == 6
    with pytest.raises(ValueError, match=r"q_proj.*materialize"):
        mt.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    mt.export(model, tmp_path / "exported")
    assert difference(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")), logits(model)) <= 1e-5


@pytest.mark.parametrize("transform", ["head", "rotation"])
def test_low_precision_has_one_table_of_its_dtype(transform: Any, tmp_path: Path) -> None:
    model = mt.convert(build(), transform=transform)
    reference = logits(model)
    mt.save(model, tmp_path)
    moved = copy.deepcopy(model).to(torch.bfloat16)
    loaded = mt.load(tmp_path, dtype=torch.bfloat16)
    for low in (moved, loaded):
        assert low.dtype == torch.bfloat16 == low.get_input_embeddings().weight.dtype == low(ids()).logits.dtype
        assert low.get_input_embeddings()(ids()).dtype == torch.bfloat16
        exact = PITEmbedding.adopt(nn.Embedding.from_pretrained(low.lm_head.weight.detach().float()))
        assert torch.equal(low.get_input_embeddings()(ids()), exact(ids()).bfloat16())  # rounded once, at the end
        stock = build().to(torch.bfloat16)
        assert difference(logits(low), reference) <= 2 * difference(logits(stock), logits(build()))
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in moved.state_dict().items())
    loaded.save_pretrained(tmp_path / "again")
    again = mt.load(tmp_path / "again")
    assert again.dtype == torch.bfloat16 and torch.equal(logits(again), logits(loaded))
    assert copy.deepcopy(model).half().dtype == torch.float16
