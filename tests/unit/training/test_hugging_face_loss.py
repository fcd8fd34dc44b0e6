"""The loss of a transformers model in a run: that of all its logits, which it does not hold."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_models import FAMILIES, build, ids
from machine import peak_bytes
from torch import Tensor

import manifold_tying as mt
from manifold_tying.training.hf_model import HuggingFaceModel
from manifold_tying.training.split_table import SplitTable

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "no cap where the config has one": ("Llama", {"final_logit_softcapping": 3.0}),
}


def started(family: str, split: bool, **changes: Any) -> HuggingFaceModel:
    model = build(family, **changes)
    return HuggingFaceModel(model, None, SplitTable(mt.convert(model), memory="trainable") if split else None)


def all_logits(model: HuggingFaceModel, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten(), ignore_index=5)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_all_logits(form: str, split: bool) -> None:
    family, changes = FORMS[form]
    model, batch = started(family, split, **changes), ids(3, 9)
    batch[:, 4] = 5
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = [model.loss(batch[:, :-1], batch[:, 1:], ignore_index=5), all_logits(model, batch)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    found, expected = (torch.autograd.grad(loss, trained) for loss in losses)
    largest = max(float(g.abs().max()) for g in expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize(("family", "split"), [("Llama", False), ("Llama", True), ("Gemma 3", False)])
def test_peak_memory_is_far_below_the_logits(family: str, split: bool) -> None:
    model = started(family, split, vocab_size=40_000)
    batch = torch.randint(3, 40_000, (4, 129), generator=torch.Generator().manual_seed(0))
    logits = 4 * 128 * 40_000 * 4
    assert peak_bytes(lambda: model.loss(batch[:, :-1], batch[:, 1:]).backward()) < logits / 5
    assert peak_bytes(lambda: all_logits(model, batch).backward()) > logits
