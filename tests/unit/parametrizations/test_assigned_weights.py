"""Writing a constrained weight: an assignment projects, a write in place takes effect or is warned of."""

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, RiemannianSGD

LAYERS: dict[str, Callable[[], Any]] = {
    "stiefel, tall": lambda: mt.stiefel(nn.Linear(8, 16)),
    "stiefel, wide": lambda: mt.stiefel(nn.Linear(16, 8)),
    "stiefel, blocks": lambda: mt.stiefel(nn.Linear(8, 16), blocks=4),
    "stiefel, bfloat16": lambda: mt.stiefel(nn.Linear(8, 16).bfloat16()),
    "orthogonal": lambda: mt.orthogonal(nn.Linear(8, 16)),
    "convolution": lambda: mt.stiefel(nn.Conv2d(3, 8, 3)),
}


def nearest(weight: Tensor, blocks: int) -> Tensor:
    """The nearest orthonormal matrix, of each block of rows, by the SVD."""
    U, _, Vh = torch.linalg.svd(weight.detach().double().flatten(1).unflatten(0, (blocks, -1)), full_matrices=False)
    return (U @ Vh).reshape(weight.shape)


@pytest.mark.parametrize("as_parameter", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_an_assigned_weight_is_projected(name: str, as_parameter: bool) -> None:
    layer = LAYERS[name]()
    drawn = torch.randn(layer.weight.shape, dtype=layer.weight.dtype)
    with pytest.warns(UserWarning, match="moved it by") if as_parameter else contextlib.nullcontext():
        layer.weight = nn.Parameter(drawn) if as_parameter else drawn
    accuracy = 1e-2 if drawn.dtype == torch.bfloat16 else 1e-5
    expected = nearest(drawn, 4 if "blocks" in name else 1).to(drawn.dtype)
    torch.testing.assert_close(layer.weight, expected, rtol=0, atol=accuracy)
    assert set(dict(layer.named_parameters())) == {"bias", "parametrizations.weight.original"}
    layer.weight = nn.init.kaiming_normal_(layer.weight) if name == "stiefel, tall" else drawn  # the stored tensor
    assert mt.linalg.defect(layer.parametrizations.weight.original).max() < 1e-6 or name == "orthogonal"


WRITTEN = LAYERS | {
    "orthogonal, wide": lambda: mt.orthogonal(nn.Linear(16, 8)),
    "equivalence": lambda: mt.equivalence(nn.Linear(8, 8), block_size=4),
    "spd": lambda: mt.spd(nn.Linear(8, 8), "weight"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_write_in_place_takes_effect_or_is_warned_of(name: str) -> None:
    layer = WRITTEN[name]()
    before = layer.weight.detach().clone()
    nn.init.normal_(layer.weight)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unchanged = torch.equal(layer.weight, before)
        layer.weight  # noqa: B018 - once
    assert unchanged == (len(caught) == 1)
    assert not caught or ("written in place" in str(caught[0].message) and "layer.weight = " in str(caught[0].message))
    kept = layer.weight.clone().mul_(2)  # one's own copy
    assert layer.weight.shape == kept.shape


@pytest.mark.parametrize("make", [mt.stiefel, mt.sphere])
def test_two_weights_that_are_added_have_gradients_of_their_own(make: Any) -> None:
    layers, x = [make(nn.Linear(8, 16)) for _ in range(2)], torch.randn(3, 8)
    for _ in range(2):
        nn.functional.linear(x, layers[0].weight + layers[1].weight).sum().backward()
    for layer in layers:
        torch.testing.assert_close(layer.parametrizations.weight.original.grad, 2 * x.sum(0).expand(16, 8))


def test_a_fused_normalization_is_warned_of_where_it_is_lost() -> None:
    normalization = nn.BatchNorm2d(8).eval()
    normalization.get_buffer("running_var").uniform_(0.5, 2)
    x = torch.randn(2, 3, 6, 6)
    for layer in (mt.stiefel(nn.Conv2d(3, 8, 3)), mt.equivalence(nn.Conv2d(3, 8, 3))):
        expected, lost = normalization(layer.eval()(x)), "Stiefel" in str(layer)
        with pytest.warns(UserWarning, match="materialize first") if lost else contextlib.nullcontext():
            fused = fuse_conv_bn_eval(layer, normalization)
        assert torch.allclose(fused(x), expected, atol=1e-5) != lost
        torch.testing.assert_close(fuse_conv_bn_eval(mt.materialize(layer), normalization)(x), expected)


def test_an_assigned_tensor_is_copied() -> None:
    class Ball(geoopt.PoincareBall):
        def projx(self, x: Tensor) -> Tensor:
            return x if self._check_point_on_manifold(x)[0] else super().projx(x)

    layer, drawn = mt.constrain(nn.Linear(3, 3), "weight", Ball()), torch.zeros(3, 3)
    layer.weight = drawn
    nn.init.constant_(layer.weight, 0.1)
    assert not drawn.any() and layer.weight.all()


def test_a_constrained_weight_cannot_be_tied() -> None:
    embedding, head = nn.Embedding(16, 8), LAYERS["orthogonal"]()
    before = head.weight.detach().clone()
    with pytest.raises(ValueError, match="cannot be tied to a parameter of another module"):
        head.weight = embedding.weight
    for wrong in (None, before.numpy()):
        with pytest.raises(ValueError, match=r"expected a tensor to assign to Linear.weight"):
            head.weight = wrong
    assert torch.equal(head.weight, before)


def test_a_constraint_on_a_copy_leaves_the_original_alone() -> None:
    first = mt.stiefel(nn.LSTM(8, 8), "weight_hh_l0", blocks=4)
    second = copy.deepcopy(first)
    mt.orthogonal(second, "weight_ih_l0", blocks=4)
    for lstm in (first, second):
        lstm(torch.randn(2, 3, 8))[0].sum().backward()
    assert "parametrizations.weight_ih_l0.original" not in dict(first.named_parameters())


@pytest.mark.parametrize("make", [RiemannianAdam, RiemannianSGD])
@pytest.mark.parametrize("retraction", ["polar", "qr"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_optimizer_projects_what_was_written_through_data(make: Any, retraction: Any, count: int) -> None:
    """By the nearest point to what was written, from which the step is small."""
    torch.manual_seed(0)
    layers: list[Any] = [mt.stiefel(nn.Linear(8, 16), retraction=retraction) for _ in range(count)]
    optimizer = make([p for layer in layers for p in layer.parameters()], lr=1e-3)
    x = torch.randn(64, 8)

    def step() -> None:
        optimizer.zero_grad()
        sum((layer(x) - 1).square().mean() for layer in layers).backward()
        optimizer.step()

    step()
    for layer in layers:
        layer.weight.data.normal_(0, 0.02)
    expected = [nearest(layer.weight, 1) for layer in layers]
    step()
    assert (
        max(float((layer.weight.detach() - near).norm()) for layer, near in zip(layers, expected, strict=True)) < 0.03
    )


@pytest.mark.parametrize(
    ("layer", "name", "wrong", "right"),
    [
        (lambda: nn.GRU(4, 4), "weight_hh_l0", 4, 3),
        (lambda: nn.Conv2d(16, 64, 3, groups=16), "weight", None, 16),
        (lambda: nn.ConvTranspose1d(8, 8, 3, groups=2), "weight", None, 2),
    ],
)
def test_blocks_that_are_not_the_stacked_matrices_are_warned_of(layer: Any, name: str, wrong: Any, right: int) -> None:
    with pytest.warns(UserWarning, match=f"stacks {right} matrices.*pass blocks={right}"):
        mt.orthogonal(layer(), name, blocks=wrong)
    made = mt.orthogonal(layer(), name, blocks=right)
    for block in getattr(made, name).detach().double().flatten(1).chunk(right):
        torch.testing.assert_close(
            torch.linalg.svdvals(block), torch.ones(min(block.shape)).double(), atol=1e-5, rtol=0
        )
    mt.orthogonal(layer(), name, blocks=1)
    mt.orthogonal(nn.Linear(4, 8), blocks=2)  # rows that one stacked oneself


@pytest.mark.parametrize("wrong", [torch.eye(3), torch.rand(2, 4, 4), torch.rand(4), torch.eye(4, dtype=torch.int64)])
@pytest.mark.parametrize(
    "constrain", [mt.stiefel, mt.orthogonal, mt.doubly_stochastic, mt.equivalence, mt.spd, mt.low_rank]
)
def test_a_weight_of_another_shape_or_kind_is_refused(constrain: Callable[..., Any], wrong: Tensor) -> None:
    layer = nn.Linear(4, 4)
    nn.init.eye_(layer.weight)
    before = copy.deepcopy(constrain(layer, "weight").state_dict())
    with pytest.raises(ValueError, match=r"a floating tensor .* Linear.weight of shape \(4, 4\), got torch"):
        layer.weight = wrong
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
