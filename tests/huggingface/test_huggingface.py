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
import torch.nn.functional as F
from huggingface_models import FAMILIES, D, V, build, difference, ids, interface, logits, turned
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.quantizers import auto

import manifold_tying as mt
from manifold_tying.huggingface import halves


def test_padding_rows_and_padded_vocabulary() -> None:
    model = build("Llama", vocab_size=128)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[0] = 0
        table[V:] = 0
    before = logits(model)
    mt.convert(model, bridge=True, memory="trainable")
    assert difference(logits(model), before) <= 1e-5
    pit = interface(model)
    assert not pit.memory[0].any() and not pit.memory[V:].any()
    embedding = halves(model)[0]
    embedding(torch.tensor([[0, 5]])).sum().backward()
    gradient = pit.parametrizations.memory.original.grad
    assert not gradient[0].any() and gradient[5].any()


def test_an_embedding_that_does_more_is_refused() -> None:
    class Shifted(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    model = build()
    model.get_input_embeddings().__class__ = Shifted
    refused(model, "computes more")


def test_other_models_and_options_are_refused() -> None:
    refused(build(vocab_size=12), "V >= d")
    for option in ("transform", "memory", "source"):
        refused(build(), "unknown", **{option: "none"})
    refused(mt.convert(build()), "already converted")
    with pytest.raises(ValueError, match="PreTrainedModel"):
        mt.convert(nn.Linear(3, 3))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="converted by manifold_tying"):
        mt.save(build(), "nowhere")


def refused(model: Any, reason: str, **options: Any) -> None:
    tokens = ids() % model.config.vocab_size
    modules, config, before = list(model.modules()), model.config.to_dict(), logits(model, tokens)
    with pytest.raises(ValueError, match=reason):
        mt.convert(model, **options)
    assert list(model.modules()) == modules and model.config.to_dict() == config
    assert torch.equal(logits(model, tokens), before)


@pytest.mark.parametrize("source", ["input", "output"])
def test_untied_tables_with_a_source(source: Any) -> None:
    model = build(tie_word_embeddings=False)
    side = model.get_input_embeddings() if source == "input" else model.get_output_embeddings()
    table = side.weight.detach().clone()
    with pytest.warns(UserWarning, match=source):
        mt.convert(model, source=source)
    torch.testing.assert_close(interface(model).materialize()[1].T, table, rtol=1e-4, atol=1e-5)  # transform="head"


def test_conversion_losses_say_what_each_choice_costs() -> None:
    model = build().train()
    model.model.layers[0].eval()
    batch = {"input_ids": ids(), "labels": ids()}
    before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
    losses = mt.conversion_losses(model, batch)
    assert list(losses) == ["source", "identity", "head", "embedding", "bridge", "rotation"]
    assert list(model.modules()) == modules and model.training and not model.model.layers[0].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for choice, loss in losses.items():
        twin = build()
        if choice != "source":
            options: Any = {"bridge": True} if choice == "bridge" else {"transform": choice}
            mt.convert(twin, **options)
        assert twin(**batch).loss.item() == pytest.approx(loss, rel=1e-6)
    assert losses["bridge"] == pytest.approx(losses["source"], rel=1e-5)
    assert losses["rotation"] == pytest.approx(losses["source"], rel=1e-5)  # its last gain is 1
    assert losses["identity"] != pytest.approx(losses["source"], rel=1e-4)
    assert list(mt.conversion_losses(build("OPT"), batch)) == ["source", "identity", "head", "embedding", "bridge"]


@pytest.mark.parametrize(
    ("family", "bridge"),
    [*((family, True) for family in FAMILIES if family != "Qwen3"), ("Llama", False)],
)
def test_every_family_is_converted_saved_loaded_and_exported(family: str, bridge: bool, tmp_path: Path) -> None:
    model = build(family)
    stock, hidden = logits(model), torch.randn(3, D)
    assert mt.convert(model, bridge=bridge, memory="trainable" if bridge else "frozen") is model
    assert (difference(logits(model), stock) <= 1e-5) == bridge  # without it another function
    head = model.get_output_embeddings()
    assert difference(F.linear(hidden, head.weight, head.bias), head(hidden)) <= 1e-5
    assert model(ids(), logits_to_keep=1).logits.shape == (2, 1, V)
    before = logits(turned(model))
    mt.save(model, tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    shapes = {name: tensor.shape for name, tensor in load_file(file).items()}
    assert not any(shape == (V, D) and name.endswith(".weight") for name, shape in shapes.items() if "wpe" not in name)
    loaded = mt.load(tmp_path / "saved")
    assert torch.equal(logits(loaded), before)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), before)
    stored = loaded.state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    frozen = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in loaded.named_parameters()} == frozen
    assert not hasattr(loaded, "hf_quantizer") and halves(loaded)[0].interface is halves(loaded)[1].interface
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


def test_exported_tables_are_computed_in_float64_and_cast_once(tmp_path: Path) -> None:
    model = turned(mt.convert(build(), bridge=True, memory="frozen")).to(torch.bfloat16)
    mt.export(model, tmp_path)
    pit = interface(model)
    Z, L, B = (t.detach().double().numpy() for t in (pit.memory, pit.cholesky_factor, pit.bridge))
    T = L @ L.T
    tables = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tables["lm_head.weight"], torch.tensor(Z @ T @ B.T).bfloat16())
    assert torch.equal(tables["model.embed_tokens.weight"], torch.tensor(Z @ np.linalg.inv(T) @ B).bfloat16())


def test_readers_that_do_not_know_us_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mt.convert(build(), memory="frozen")
    mt.save(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "plain")  # as the Trainer does
    for known in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(known, "manifold-tying")
    for folder in ("saved", "plain"):
        for kind in (AutoModelForCausalLM, LlamaForCausalLM):
            with pytest.raises(RuntimeError, match="mismatch"):
                kind.from_pretrained(tmp_path / folder)


def test_importing_us_imports_nothing_slow_and_still_registers(tmp_path: Path) -> None:
    mt.save(mt.convert(build(), memory="frozen"), tmp_path)
    program = (
        "import sys, torch, warnings, manifold_tying as mt\n"
        "script, warns = torch.jit.script, lambda: warnings.warn('`torch.jit.script` is deprecated', FutureWarning)\n"
        "torch.jit.script = lambda *args, **options: (warns(), script(*args, **options))[1]  # as torch 2.14 does\n"
        "mt.PIT, mt.stiefel, mt.optim, mt.convert, mt.models, mt.diagnostics\n"
        "slow = {'torch._dynamo', 'scipy.stats', 'matplotlib', 'tensorboard', 'tokenizers', 'pandas', 'transformers', 'peft'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
        "from transformers import AutoModelForCausalLM\n"
        f"print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).get_input_embeddings()).__name__)\n"
        "from transformers.quantizers import auto\n"
        "assert auto.__loader__ is auto.__spec__.loader, 'the import hook left its own loader behind'\n"
        "print(type(auto.__loader__).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["PITEmbedding", "SourceFileLoader"] and "jit.script" not in done.stderr


def test_transformers_refuses_checkpoints_whose_parts_disagree(tmp_path: Path) -> None:
    mt.save(mt.convert(build(), memory="frozen"), tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, described = load_file(file), config.read_text()
    memory = next(name for name in tensors if name.endswith("memory.original"))
    for changes in ({memory: tensors[memory] * 1.5}, {"lm_head.weight": torch.randn(V, D)}):
        save_file(tensors | changes, file, metadata={"format": "pt"})
        with pytest.raises(ValueError):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(described) | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_constrained_bodies_are_exported_as_plain_weights_and_not_saved(tmp_path: Path) -> None:
    model = mt.convert(build(), memory="frozen")
    mt.orthogonal(model.get_submodule("model.layers.0.self_attn.q_proj"))
    taken, left = mt.equivalence_(model, include="*.mlp.*", block_size=8, verbose=False)
    assert len(taken) == 6 and not any("interface" in name for name in (*taken, *left))
    with pytest.raises(ValueError, match="q_proj"):
        mt.save(model, tmp_path / "saved")
    mt.export(model, tmp_path / "exported")
    assert difference(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")), logits(model)) <= 1e-5


def test_low_precision_keeps_the_factors(tmp_path: Path) -> None:
    model = mt.convert(build(), bridge=True)
    reference = logits(model)
    mt.save(model, tmp_path)
    moved = copy.deepcopy(model).to(torch.bfloat16)
    loaded = mt.load(tmp_path, dtype=torch.bfloat16)
    for low in (moved, loaded):
        assert low.dtype == torch.bfloat16 and low.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
        assert {p.dtype for p in interface(low).parameters()} == {torch.float32}
        assert halves(low)[0](ids()).dtype == torch.bfloat16 == low(ids()).logits.dtype
        stock = build().to(torch.bfloat16)
        assert difference(logits(low), reference) <= 2 * difference(logits(stock), reference)
    assert torch.equal(logits(moved), logits(loaded))
    loaded.save_pretrained(tmp_path / "again")
    again = mt.load(tmp_path / "again")
    assert again.dtype == torch.bfloat16 and torch.equal(logits(again), logits(loaded))
    assert copy.deepcopy(model).half().dtype == torch.float16


def test_deepcopy_is_whole_and_independent() -> None:
    model = mt.convert(build(), memory="trainable")
    before = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), before)
    assert interface(twin) is halves(twin)[1].interface and interface(twin) is not interface(model)
    turned(twin)
    assert difference(logits(twin), before) > 1e-3 and torch.equal(logits(model), before)
    assert twin.resize_token_embeddings.args == (twin,)
    pickled = pickle.loads(pickle.dumps(mt.convert(build())))
    with pytest.warns(UserWarning, match="vocabulary"):
        assert pickled.resize_token_embeddings(V + 4) is pickled.get_input_embeddings()
    with pytest.raises(ValueError, match="one half"):
        copy.deepcopy(halves(model)[0])
