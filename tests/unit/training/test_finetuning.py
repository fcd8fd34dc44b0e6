"""Finetuning by orthogonal equivalence: from a trained model to a plain one, its skew vectors as an adapter."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import manifold_tying as mt
from manifold_tying import equivalence_, load_adapter, materialize, merge, save_adapter
from manifold_tying.models import Llama, LlamaConfig
from manifold_tying.poet import equivalences
from manifold_tying.tying import TransposeTying

OPTIONS: dict[str, dict[str, Any]] = {
    "block": {"block_size": 8, "terms": None},
    "full": {"scheme": "full", "fraction": 0.5, "terms": None},
    "orthogonal finetuning": {"block_size": 8, "sides": "in", "terms": None},
}


@pytest.fixture
def pretrained() -> Any:
    config = LlamaConfig(vocab_size=61, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=24)
    torch.manual_seed(0)
    return Llama(config, TransposeTying(61, 16))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids)


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


@pytest.mark.parametrize("option", OPTIONS)
def test_an_adapter_brings_a_plain_model_to_the_finetuned_one(pretrained: Any, option: str, tmp_path: Path) -> None:
    ids = torch.randint(61, (2, 9))
    model = finetuned(pretrained, **OPTIONS[option])
    path = save_adapter(model, tmp_path / "adapter.safetensors")
    skew = sum(value.numel() for key, value in load_file(path).items() if key.endswith(".skew"))
    assert skew == sum(stored.numel() for _, _, stored in equivalences(model))
    loaded = load_adapter(copy.deepcopy(pretrained), path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    for seed in (5, 6):  # also where other dimensions rotated
        again = load_adapter(finetuned(pretrained, seed, **OPTIONS[option]), path)
        assert torch.equal(logits(again, ids), logits(model, ids))
    expected = logits(model, ids)
    assert (expected - logits(pretrained, ids)).abs().max() > 1e-3
    plain = materialize(copy.deepcopy(model))
    assert set(plain.state_dict()) == set(pretrained.state_dict())
    torch.testing.assert_close(logits(plain, ids), expected, rtol=0, atol=1e-5)
    merge(loaded)  # goes on with the orders that the finetuned one would take
    merge(model)
    for (_, a, _), (_, b, _) in zip(equivalences(loaded), equivalences(model), strict=True):
        assert torch.equal(a.out_order, b.out_order) and torch.equal(a.in_order, b.in_order)


@pytest.mark.parametrize(("trained_in", "dtype"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)])
def test_an_adapter_fits_a_model_loaded_in_low_precision(
    pretrained: Any, trained_in: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    ids = torch.randint(61, (2, 9))
    model = finetuned(copy.deepcopy(pretrained).to(trained_in), block_size=8, terms=None)
    path = save_adapter(model, tmp_path / "adapter.safetensors")
    low = load_adapter(copy.deepcopy(pretrained).to(dtype), path)
    found = logits(low, ids).float()
    expected = logits(model, ids).float()
    assert (found - expected).norm() < 0.3 * (expected - logits(pretrained, ids)).norm()
    other = copy.deepcopy(pretrained).to(dtype)
    with torch.no_grad():
        other.blocks[1].mlp.down.weight[0, 0] *= 1.01  # more than bfloat16 rounds off
    with pytest.raises(ValueError, match="not the weight that the adapter was learned for"):
        load_adapter(other, path)


def test_adapters_of_wrapped_models_are_those_of_the_model(pretrained: Any, tmp_path: Path) -> None:
    """They put names of their own before a layer's, on the whole model or on a part."""
    ids = torch.randint(61, (2, 9))
    model = finetuned(pretrained, block_size=8, terms=None)
    expected = logits(model, ids)
    plain = save_adapter(model, tmp_path / "plain.safetensors")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()
    compiled = cast(nn.Module, torch.compile(parallel))
    inside = copy.deepcopy(model)
    inside.blocks[1] = cast(nn.Module, torch.compile(checkpoint_wrapper(inside.blocks[1])))
    for wrapped in (parallel, nn.DataParallel(model), compiled, inside):
        path = save_adapter(wrapped, tmp_path / "wrapped.safetensors")
        assert set(load_file(path)) == set(load_file(plain))
        assert torch.equal(logits(load_adapter(copy.deepcopy(pretrained), path), ids), expected)
    target = copy.deepcopy(pretrained)
    target.blocks[1] = cast(nn.Module, torch.compile(target.blocks[1]))
    around = cast(nn.Module, torch.compile(nn.DataParallel(target)))
    assert load_adapter(around, plain) is around
    for (_, a, stored), (_, b, expected_vector) in zip(equivalences(target), equivalences(model), strict=True):
        assert torch.equal(stored, expected_vector) and torch.equal(a.in_order, b.in_order)


def test_adapters_of_other_models_are_refused_and_change_nothing(pretrained: Any, tmp_path: Path) -> None:
    model = finetuned(pretrained, block_size=8, terms=None)
    path = save_adapter(model, tmp_path / "adapter.safetensors")
    other = copy.deepcopy(pretrained)
    with torch.no_grad():
        list(other.blocks)[-1].mlp.down.weight[0, 0] += 1
    keys = set(other.state_dict())
    with pytest.raises(ValueError, match="not the weight that the adapter was learned for"):
        load_adapter(other, path)
    assert set(other.state_dict()) == keys
    with pytest.raises(ValueError, match="which this model does not have"):
        load_adapter(nn.Linear(3, 3), path)
    sized = finetuned(pretrained, block_size=4, terms=None)
    with pytest.raises(ValueError, match="other sizes, terms or merges"):
        load_adapter(sized, path)
    save_file({"a": torch.zeros(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match=r"expected .* to be a manifold-tying equivalence adapter"):
        load_adapter(pretrained, tmp_path / "plain.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot read"):
        load_adapter(pretrained, tmp_path / "cut.safetensors")


DAMAGE: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "shape": lambda tensors, _: tensors.update(skew=tensors["skew"][:1]),
    "repeated": lambda tensors, _: tensors["in_order"].fill_(0),
    "outside": lambda tensors, _: tensors["in_order"].add_(99),
    "nan": lambda tensors, _: tensors["skew"].fill_(torch.nan),
    "other rows": lambda _, described: described.update(rows=[1, 8, 1]),
    "no terms": lambda _, described: described.pop("terms"),
    "complex": lambda tensors, _: tensors.update(skew=tensors["skew"].to(torch.complex64)),
    "surplus": lambda tensors, _: tensors.update(other=torch.zeros(1)),
    "no skew": lambda tensors, _: tensors.pop("skew"),
}

WRONG: dict[str, list[Any]] = {
    "terms": [0, 10**9, 2.5, True, "2"],
    "seed": [None, -1, 2**63, True],
    "rows": [None, 3, [], [16, 8, 16, 1], ["16", 8, 16], [16, 0, 16], [16, 8, -8]],
    "columns": [[24, 8, 25], [24, 25, 24], [2**70, 8, 24]],
    "shape": [None, 5, [16], [16.5, 24], [2**70, 24]],
    "base": [None, ""],
}


@pytest.fixture
def adapter(pretrained: Any, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], dict[str, str]]:
    """A file, and the tensors and metadata that it holds."""
    path = save_adapter(finetuned(pretrained, block_size=8, terms=None), tmp_path / "adapter.safetensors")
    with safe_open(path, "pt") as file:
        return path, load_file(path), file.metadata()


def test_adapters_with_wrong_values_are_refused_and_change_nothing(pretrained: Any, adapter: Any) -> None:
    path, tensors, metadata = adapter
    keys = set(pretrained.state_dict())
    for key, value in ((key, value) for key, values in WRONG.items() for value in values):
        described = json.loads(metadata["equivalences"])
        changed = described[list(described)[-1]]  # the others are intact, and must not be put on
        changed |= {name: value for name in changed if name.removesuffix("_float16") == key}
        save_file(tensors, path, metadata | {"equivalences": json.dumps(described)})
        with pytest.raises(ValueError, match=r"damaged|not the weight"):
            load_adapter(pretrained, path)
        assert set(pretrained.state_dict()) == keys, (key, value)


def test_damaged_adapters_are_refused_and_change_nothing(pretrained: Any, adapter: Any) -> None:
    path, whole, metadata = adapter
    keys = set(pretrained.state_dict())
    for text in ("[" * 100_000, "{}", "[]", "null", "{", '{"a": 3}', '{"": {}}'):
        save_file(whole, path, metadata | {"equivalences": text})
        with pytest.raises(ValueError, match=r"damaged|does not have"):
            load_adapter(pretrained, path)
    save_file({}, path, metadata | {"equivalences": "{}"})
    with pytest.raises(ValueError, match="describes 0 weights"):
        load_adapter(pretrained, path)
    for damage in DAMAGE.values():
        tensors = {name: tensor.clone() for name, tensor in whole.items()}
        described = json.loads(metadata["equivalences"])
        name = list(described)[-1]  # the others are whole, and must not be put on
        own = {key: tensors.pop(f"{name}.{key}") for key in ("skew", "out_order", "in_order")}
        damage(own, described[name])
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in own.items()}
        save_file(tensors, path, metadata | {"equivalences": json.dumps(described)})
        with pytest.raises(ValueError, match="damaged"):
            load_adapter(pretrained, path)
        assert set(pretrained.state_dict()) == keys


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


def test_rotations_that_drifted_are_told_of_wherever_they_are_kept(pretrained: Any, tmp_path: Path) -> None:
    message = "so R and P are only orthogonal to"
    drifted = turned(pretrained, 2, 0.2)  # ‖A‖ is about 1
    with pytest.warns(UserWarning, match=message):
        path = save_adapter(drifted, tmp_path / "adapter.safetensors")
    with pytest.warns(UserWarning, match=message):
        loaded = load_adapter(copy.deepcopy(pretrained), path)
    for model in (drifted, loaded):
        with pytest.warns(UserWarning, match=message):
            assert spread(materialize(model), pretrained) > 0.1  # what the warning is about
    # No warning, which would be an error here: the exact map at any size, and two terms while they are small.
    for terms, entry, most in ((None, 0.2, 1e-5), (None, 3.0, 1e-5), (2, 0.02, 1e-4)):
        path = save_adapter(turned(pretrained, terms, entry), tmp_path / "adapter.safetensors")
        assert spread(materialize(load_adapter(copy.deepcopy(pretrained), path)), pretrained) < most


def test_nothing_to_save_and_merged_weights_are_refused(pretrained: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no equivalence to save"):
        save_adapter(pretrained, tmp_path / "a.safetensors")
    model = finetuned(pretrained, block_size=8, terms=None)
    merge(model)
    with pytest.raises(ValueError, match="merging changed W0"):
        save_adapter(model, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"make .*missing first"):
        save_adapter(finetuned(pretrained, block_size=8, terms=None), tmp_path / "missing" / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_would_lose_what_was_trained_is_refused(pretrained: Any, tmp_path: Path) -> None:
    biased = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for model, names in ((pretrained, r"interface\.weight.* and \d+ more"), (biased, "0.bias, 1.bias, which")):
        loose, frozen = copy.deepcopy(model), copy.deepcopy(model)
        equivalence_(loose, block_size=4, verbose=False)
        assert all(p.requires_grad for p in loose.parameters())
        with pytest.raises(ValueError, match=rf"does not hold .*{names}.*freeze=True.*or save the state dict"):
            save_adapter(loose, tmp_path / "a.safetensors")
        assert not list(tmp_path.iterdir())
        equivalence_(frozen, block_size=4, freeze=True, verbose=False)
        trained = [name for name, p in frozen.named_parameters() if p.requires_grad]
        assert trained and all(name.endswith("parametrizations.weight.original") for name in trained)
        save_adapter(frozen, tmp_path / "a.safetensors").unlink()


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


def test_two_weights_of_one_layer_are_loaded_twice(tmp_path: Path) -> None:
    layer = nn.LSTM(4, 8)
    plain = copy.deepcopy(layer.requires_grad_(False))
    for name in ("weight_hh_l0", "weight_ih_l0"):
        mt.equivalence(layer, name, block_size=4, terms=None)
    path = save_adapter(layer, tmp_path / "adapter.safetensors")
    for _ in range(2):
        load_adapter(plain, path)
    assert len(equivalences(plain)) == 2
