"""What a converted model remembers: what is frozen, the exact scale of its embedding, how orthonormal its memory is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from huggingface_models import _BODY, V, build, difference, ids, logits
from torch import nn

import manifold_tying as mt
from manifold_tying.huggingface import halves
from manifold_tying.huggingface.tables import read_tables
from manifold_tying.linalg import defect
from manifold_tying.parametrizations import parametrized


def stored(model: Any, name: str) -> Any:
    return parametrized(halves(model)[0].interface)[name].original


@pytest.mark.parametrize("trainable", [True, False])
def test_a_memory_frozen_or_released_by_hand_is_so_when_loaded(trainable: bool, tmp_path: Path) -> None:
    model = mt.convert(build(), memory="frozen" if trainable else "trainable")
    stored(model, "memory").requires_grad_(trainable)
    mt.save(model, tmp_path)
    loaded = mt.load(tmp_path)
    assert stored(loaded, "memory").requires_grad is trainable
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.filterwarnings("ignore:vocabulary:UserWarning")
def test_resizing_keeps_what_is_frozen_frozen() -> None:
    for trains in (True, False):
        model: Any = mt.convert(build(), bridge=True, memory="frozen")
        for tensor in (stored(model, "cholesky_factor"), model.get_input_embeddings().interface.bridge):
            tensor.requires_grad_(trains)
        model.resize_token_embeddings(V + 4)
        assert stored(model, "cholesky_factor").requires_grad is trains
        assert model.get_input_embeddings().interface.bridge.requires_grad is trains
        assert not stored(model, "memory").requires_grad


def gemma(dtype: torch.dtype) -> Any:
    """With a width whose root bfloat16 does not have."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**{**_BODY, "hidden_size": 20, "head_dim": 8})
    return transformers.Gemma3ForCausalLM(config).eval().to(dtype)


def test_a_scale_that_low_precision_rounds_is_kept_exactly(tmp_path: Path) -> None:
    low = gemma(torch.bfloat16)
    embedded = low.get_input_embeddings()(ids())
    mt.convert(low, transform="embedding", memory="frozen")
    embedding = halves(low)[0]
    assert embedding.scale == pytest.approx(20**0.5, rel=1e-12)
    assert difference(embedding(ids()), embedded) < 2**-8  # rounded to bfloat16 when used, as the stock module does
    scaled = mt.convert(gemma(torch.float32))
    looked_up = halves(scaled)[0].interface(ids())
    assert difference(halves(scaled)[0](ids()), looked_up * 20**0.5) <= 1e-6
    mt.save(low, tmp_path)
    assert halves(mt.load(tmp_path, dtype=torch.float32))[0].scale == embedding.scale


def test_probing_an_embedding_takes_a_few_rows_wherever_its_padding_is() -> None:
    model = build()
    model.get_input_embeddings().padding_idx = 10**12  # a table up to there would be 128 TB
    add_hook_to_module(model.get_input_embeddings(), ModelHook())  # as a model that was loaded with a device_map has
    assert read_tables(model).scale == 1.0 and read_tables(model).padding_idx == 10**12


def test_a_memory_read_into_float64_is_orthonormal_to_float64(tmp_path: Path) -> None:
    model = mt.convert(build(), memory="trainable")
    mt.save(model, tmp_path / "single")
    loaded = mt.load(tmp_path / "single", dtype=torch.float64)
    Z = halves(loaded)[0].interface.memory
    assert Z.dtype == torch.float64 and defect(Z) <= 1e-13
    assert difference(Z, halves(model)[0].interface.memory.double()) <= 1e-6
    assert stored(loaded, "memory").requires_grad and hasattr(stored(loaded, "memory"), "manifold")
    mt.save(loaded, tmp_path / "double")
    again = mt.load(tmp_path / "double", dtype=torch.float64)
    assert torch.equal(halves(again)[0].interface.memory, Z)  # bit for bit: not projected once more


def test_a_materialized_interface_is_exported_and_not_saved(tmp_path: Path) -> None:
    model = mt.convert(build(), memory="frozen")
    before = logits(model)
    mt.materialize(model)
    keys = dict(model.all_tied_weights_keys)
    with pytest.raises(ValueError, match="materialize"):
        mt.save(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="materialize"):
        model.resize_token_embeddings(V + 4)
    assert model.all_tied_weights_keys == keys and not (tmp_path / "saved").exists()
    mt.export(model, tmp_path / "exported")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert difference(logits(exported), before) <= 1e-5
    layers = nn.ModuleList(module for module in model.modules() if isinstance(module, nn.Linear))
    assert mt.materialize(layers) is layers  # what the message asks for
