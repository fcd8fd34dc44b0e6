"""Finetuning by orthogonal equivalence: from a trained model to a plain one."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn

import manifold_tying as mt
from manifold_tying import equivalence_, materialize
from manifold_tying.models import Llama, LlamaConfig
from manifold_tying.poet import equivalences
from manifold_tying.tying import TransposeTying


@pytest.fixture
def pretrained() -> Any:
    config = LlamaConfig(vocab_size=61, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=24)
    torch.manual_seed(0)
    return Llama(config, TransposeTying(61, 16))


def finetuned(model: Any, seed: int = 5, **options: Any) -> Any:
    """A copy with equivalences on its body, trained for a few steps of those alone."""
    model = copy.deepcopy(model)
    equivalence_(model, freeze=True, seed=seed, verbose=False, **options)
    vectors = [stored for _, _, stored in equivalences(model)]
    optimizer = torch.optim.Adam(vectors, lr=3e-2)
    ids = torch.randint(61, (4, 12))
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return model


def test_one_side_rotates_in_the_blocks_asked_for(pretrained: Any) -> None:
    """Orthogonal finetuning with blocks of b has n(b - 1)/2 parameters a layer; a share keeps the sum of both sides."""
    layer = pretrained.blocks[0].mlp.down  # 24 inputs, 16 outputs
    m, n = layer.weight.shape
    found = {}
    for sides in ("in", "out", "both"):
        one = mt.equivalence(copy.deepcopy(layer), block_size=8, sides=sides)
        ((_, part, stored),) = equivalences(one)
        found[sides] = (stored.numel(), part.spec.R.num_rotated, part.spec.P.num_rotated)
    assert found == {"in": (n * 7 // 2, 0, n), "out": (m * 7 // 2, m, 0), "both": ((m + n) * 7 // 2, m, n)}
    with pytest.raises(ValueError, match="unknown sides 'left'; choose one of both, in, out"):
        mt.equivalence(copy.deepcopy(layer), sides=cast(Any, "left"))
    with pytest.raises(ValueError, match="leave it out with sides='in'"):
        equivalence_(pretrained, sides="in", out_share=0.0, verbose=False)
    with pytest.raises(ValueError, match="nothing to rotate"):
        mt.equivalence(nn.Linear(4, 1), sides="out")


def test_one_sided_finetuning_keeps_the_angles_between_neurons(pretrained: Any) -> None:
    def gram(weight: torch.Tensor) -> torch.Tensor:
        return weight @ weight.mT  # rows are neurons

    model = materialize(finetuned(pretrained, block_size=8, sides="in", terms=None))
    both = materialize(finetuned(pretrained, block_size=8, terms=None))
    before = gram(pretrained.blocks[0].mlp.down.weight)
    torch.testing.assert_close(gram(model.blocks[0].mlp.down.weight), before, rtol=1e-4, atol=1e-6)
    assert (gram(both.blocks[0].mlp.down.weight) - before).norm() > 1e-3 * before.norm()


def turned(model: Any, terms: int | None, entry: float) -> Any:
    """A copy with an equivalence whose skew vectors have that size."""
    model = copy.deepcopy(model)
    equivalence_(model, freeze=True, block_size=8, terms=terms, seed=5, verbose=False)
    with torch.no_grad():
        for _, _, stored in equivalences(model):
            stored.fill_(entry)
    return model


def spread(plain: Any, before: Any) -> float:
    """The largest relative change of a singular value of one layer."""
    values = [torch.linalg.svdvals(model.blocks[0].mlp.down.weight.detach().double()) for model in (plain, before)]
    return float((values[0] / values[1] - 1).abs().max())


def test_rotations_that_drifted_are_told_of(pretrained: Any) -> None:
    message = "so R and P are only orthogonal to"
    with pytest.warns(UserWarning, match=message):
        assert spread(materialize(turned(pretrained, 2, 0.2)), pretrained) > 0.1  # ‖A‖ is about 1
    # No warning, which would be an error here: the exact map at any size, and two terms while they are small.
    for terms, entry, most in ((None, 0.2, 1e-5), (None, 3.0, 1e-5), (2, 0.02, 1e-4)):
        assert spread(materialize(turned(pretrained, terms, entry)), pretrained) < most


def test_the_matrices_of_a_lora_are_left(pretrained: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["query", "up"])
    model = peft.inject_adapter_in_model(config, pretrained)
    lora = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lora_" in name}
    for exclude in (None, (), "*.down"):
        taken, left = equivalence_(copy.deepcopy(model), exclude=exclude, block_size=4, verbose=False)
        assert lora and lora <= set(left) and any(name.endswith("query.base_layer") for name in taken)
    taken, _ = equivalence_(copy.deepcopy(model), "*.lora_A.*", block_size=4, verbose=False)
    assert set(taken) == {name for name in lora if ".lora_A." in name}
