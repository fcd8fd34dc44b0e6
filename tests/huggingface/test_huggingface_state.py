"""What a converted model remembers: the exact scale of its embedding, where its parts lie, that it is frozen."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from huggingface_models import _BODY, D, V, build, difference, ids, interface, logits, make, round_trip, turned
from torch import nn

import manifold_tying as mt
from manifold_tying.huggingface.tables import read_tables


def gemma(dtype: torch.dtype) -> Any:
    """With a width whose root bfloat16 does not have."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**{**_BODY, "hidden_size": 20, "head_dim": 8})
    return transformers.Gemma3ForCausalLM(config).eval().to(dtype)


def test_a_scale_that_low_precision_rounds_is_kept_exactly(tmp_path: Path) -> None:
    low = mt.convert(gemma(torch.bfloat16))
    assert low.get_input_embeddings().scale == pytest.approx(20**0.5, rel=1e-12)
    scaled = mt.convert(gemma(torch.float32))
    looked_up = interface(scaled).embed(ids())
    assert difference(scaled.get_input_embeddings()(ids()), looked_up * 20**0.5) <= 1e-6
    mt.save(low, tmp_path)
    wide: Any = mt.load(tmp_path, dtype=torch.float32)
    assert wide.get_input_embeddings().scale == low.get_input_embeddings().scale


def test_probing_an_embedding_takes_a_few_rows_wherever_its_padding_is() -> None:
    model = build()
    model.get_input_embeddings().padding_idx = 10**12  # a table up to there would be 128 TB
    assert read_tables(model).scale == 1.0 and model.get_input_embeddings().padding_idx == 10**12


def test_hooks_of_a_device_map_stay_and_run() -> None:
    """accelerate puts the forward of the class that it finds into the module."""
    calls = []

    class Counts(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(module)
            return args, kwargs

    model, plain = build(), mt.convert(build())
    add_hook_to_module(model.get_input_embeddings(), Counts())
    mt.convert(model)
    calls.clear()
    assert torch.equal(logits(model), logits(plain)) and calls == [model.get_input_embeddings()]


def test_a_hook_that_was_removed_leaves_no_stock_forward() -> None:
    model = build()
    remove_hook_from_module(add_hook_to_module(model.get_input_embeddings(), ModelHook()))
    assert torch.equal(logits(mt.convert(model)), logits(mt.convert(build())))


def test_a_model_loaded_with_a_tight_device_map_computes_the_same(tmp_path: Path) -> None:
    model = turned(mt.convert(build()))
    mt.save(model, tmp_path / "saved")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    room = {"cpu": size * 9 // 10, "disk": 10 * size}
    placed: dict[str, Any] = {"device_map": "auto", "max_memory": room, "offload_folder": tmp_path}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **placed)
    assert torch.equal(logits(loaded), logits(model))


def test_other_bodies_are_saved_loaded_and_exported(tmp_path: Path) -> None:
    settings = {
        "vocab_size": V, "d_model": D, "n_head": 2, "d_head": 8, "d_inner": D, "block_sizes": [1, 1], "num_decoder_layers": 1
    }  # fmt: skip
    round_trip(mt.convert(make("FunnelForMaskedLM", "FunnelConfig", settings)), tmp_path)
