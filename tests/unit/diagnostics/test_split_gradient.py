"""The two sources of a token table's gradient, against autograd's sum, the note's formulas and finite differences."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from huggingface_models import build
from references import reference
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying.diagnostics import (
    split_gradient,
    vector_angles,
)

V, D = 40, 8
INTERFACES: dict[str, Any] = {
    "untied": lambda: mt.Untied(V, D),
    "transpose": lambda: mt.TransposeTying(V, D, std=0.5),
    "pit-frozen": lambda: mt.PIT(V, D, memory="frozen"),
    "pit-free": lambda: mt.PIT(V, D),
    "pit-trainable": lambda: mt.PIT(V, D, memory="trainable"),
}


def batch() -> tuple[Tensor, Tensor]:
    """Token ids below 20 only, and a target that does not count."""
    ids = torch.randint(20, (3, 6))
    targets = torch.randint(V, (3, 6))
    targets[0, 0] = -100
    return ids, targets


@pytest.mark.parametrize("name", INTERFACES)
def test_the_parts_of_the_reference_model_sum_to_its_gradient(name: str) -> None:
    model = reference(INTERFACES[name]()).double()
    ids, targets = batch()
    parts = split_gradient(model, ids, targets)
    assert all(p.grad is None for p in model.parameters())
    model.loss(ids, targets).backward()
    full = {n: p.grad for n, p in model.named_parameters() if n.startswith("interface.") and p.requires_grad}
    assert list(parts) == list(full)
    for parameter, sides in parts.items():
        torch.testing.assert_close(sides.lookup + sides.head, full[parameter], rtol=1e-9, atol=1e-13)
        assert not sides.lookup.requires_grad and not sides.head.requires_grad
        assert name not in ("transpose", "pit-trainable") or not sides.lookup[20:].any()  # only the ids of the batch
    # negative control: either part alone is not the gradient, but for untied tables, where one of them is nothing
    for parameter, sides in parts.items():
        zero = [not side.any() for side in (sides.lookup, sides.head)]
        expected = {"interface.embedding": [False, True], "interface.head": [True, False]}
        assert zero == expected.get(parameter, [False, False]), parameter


@pytest.mark.parametrize(("family", "tied"), [("Granite", True), ("Llama", False)])
def test_the_parts_of_a_hugging_face_model_sum_to_its_gradient(family: str, tied: bool) -> None:
    model = build(family, tie_word_embeddings=tied).double()
    ids, targets = batch()
    parts = split_gradient(model, ids, targets)
    logits = model(ids).logits
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    table = model.model.embed_tokens.weight
    sides = parts["model.embed_tokens.weight"]
    # the loss is taken of float32 logits, as everywhere
    torch.testing.assert_close(sides.lookup + sides.head, table.grad, rtol=1e-5, atol=1e-7)
    assert sides.head.any() == tied and ("lm_head.weight" in parts) == (not tied)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_dropout_is_drawn_once() -> None:
    """Else the parts would be of two different losses."""
    model = build().double()
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.5))
    model.train()
    ids, targets = batch()
    torch.manual_seed(1)
    sides = split_gradient(model, ids, targets)["model.embed_tokens.weight"]
    torch.manual_seed(1)
    F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten()).backward()
    torch.testing.assert_close(sides.lookup + sides.head, model.model.embed_tokens.weight.grad, rtol=1e-5, atol=1e-7)


def test_the_head_alone_trains() -> None:
    model, (ids, targets) = reference(INTERFACES["untied"]()), batch()
    for name, p in model.named_parameters():
        p.requires_grad_(name == "interface.head")
    (sides,) = split_gradient(model, ids, targets).values()
    assert not sides.lookup.any() and sides.head.any()


def test_nothing_to_split() -> None:
    ids, targets = batch()
    for model in (reference(INTERFACES["transpose"]()), build()):
        with pytest.raises(ValueError, match=r"\(B, N\)"):
            split_gradient(model, ids, targets[:, 1:])
        for p in model.parameters():
            p.requires_grad_(False)
        with pytest.raises(ValueError, match="unfreeze"):
            split_gradient(model, ids, targets)
    with pytest.raises(ValueError, match="get_output_embeddings"):
        split_gradient(nn.Linear(2, 2), ids, targets)


def test_vector_angles() -> None:
    a = torch.tensor([[1.0, 0.0], [1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    b = torch.tensor([[1.0, 1e-7], [-2.0, 0.0], [4.0, 3.0], [1.0, 0.0]])
    angles = vector_angles(a, b)
    np.testing.assert_allclose(angles[:3], [1e-7, np.pi, np.arccos(24 / 25)], rtol=1e-6)
    assert angles[3].isnan() and angles.dtype == torch.float64
    # negative control: the arc cosine of a float32 cosine is 0 for the first
    assert torch.cosine_similarity(a, b)[0].clamp(max=1).acos() != pytest.approx(1e-7, rel=0.1)
