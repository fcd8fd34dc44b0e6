"""Constraints on layers: every kind of constraint, every kind of layer, and what users do with such layers."""

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from layers import ORTHONORMAL, Stack, assert_one_graph, stored
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from manifold_tying import equivalence, isospectral, low_rank, materialize, orthogonal, spd, stiefel
from manifold_tying.manifolds import Stiefel
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.parametrizations import constraints, manifold_of

# name: how to build the layer, and the constrained tensor
LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear tall": (lambda: nn.Linear(4, 9), "weight"),
    "linear wide": (lambda: nn.Linear(9, 4), "weight"),
    "linear square": (lambda: nn.Linear(5, 5), "weight"),
    "embedding": (lambda: nn.Embedding(11, 4), "weight"),
    "conv": (lambda: nn.Conv2d(2, 4, 3), "weight"),
    "conv tall": (lambda: nn.Conv1d(1, 8, 3), "weight"),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 2, 2), "weight"),
    "stack": (Stack, "weight"),
}
EACH_LAYER = list(zip(LAYERS, itertools.cycle(ORTHONORMAL), strict=False))
every_layer = pytest.mark.parametrize(("layer", "constraint"), EACH_LAYER)


def as_matrices(weight: Tensor) -> Tensor:
    """The tall matrices of a weight, written out anew: kernels flattened, wide ones transposed."""
    matrix = weight.flatten(1) if weight.ndim > 3 or (weight.ndim == 3 and weight.shape[0] == 8) else weight
    return matrix.mT if matrix.shape[-2] < matrix.shape[-1] else matrix


def defect(weight: Tensor) -> float:
    matrices = as_matrices(weight.detach())
    eye = torch.eye(matrices.shape[-1], dtype=torch.float64)
    return (matrices.double().mT @ matrices.double() - eye).abs().max().item()


def perturb(module: nn.Module, name: str = "weight", size: float = 0.1) -> None:
    """Away from the point where the constraint was put on, where a wrong map may still look right."""
    with torch.no_grad():
        point = stored(module, name)
        step = size * torch.randn_like(point)
        on_manifold = isinstance(manifold_of(point), Stiefel)
        point.copy_(Stiefel().move(point, step) if on_manifold else point + step)


# ---- orthonormal weights


@pytest.mark.parametrize(
    ("layer", "constraint"), dict.fromkeys([*EACH_LAYER, *itertools.product(["linear tall", "conv"], ORTHONORMAL)])
)
def test_the_weight_becomes_the_nearest_orthonormal_one(layer: str, constraint: str) -> None:
    make, name = LAYERS[layer]
    module = make()
    before = getattr(module, name).detach().clone()
    assert ORTHONORMAL[constraint](module, name) is module
    after = getattr(module, name)
    assert after.shape == before.shape and after.dtype == before.dtype
    U, _, Vh = torch.linalg.svd(as_matrices(before).double(), full_matrices=False)
    # float32 and the condition of these small matrices, some tens at worst
    torch.testing.assert_close(as_matrices(after).double(), U @ Vh, rtol=0, atol=1e-5)
    assert defect(after) < 1e-6
    point = stored(module, name)
    assert point.is_contiguous() and point.shape[-2] >= point.shape[-1]


# ---- what users do with constrained layers


@every_layer
def test_materialize_leaves_plain_weights(layer: str, constraint: str) -> None:
    make, name = LAYERS[layer]
    module = ORTHONORMAL[constraint](make(), name)
    perturb(module, name)
    getattr(module, name).sum().backward()
    assert materialize(module) is module  # to the same weight, by check_parametrization
    weight = getattr(module, name)
    assert type(weight) is nn.Parameter and weight.requires_grad and weight.is_contiguous()
    assert manifold_of(weight) is None and list(constraints(module)) == []
    # The gradient was that of the stored tensor, of another shape perhaps: a step with it would be wrong or fail.
    assert weight.grad is None
    getattr(module, name).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    ORTHONORMAL[constraint](module, name)
    assert defect(getattr(module, name)) < 1e-6


def test_materialize_reaches_everything_below_and_only_ours() -> None:
    model = nn.Sequential(stiefel(nn.Linear(4, 4)), nn.Sequential(spd(nn.Linear(3, 3), "weight")), nn.Linear(2, 2))
    nn.utils.parametrizations.weight_norm(model[2])
    assert [path for path, *_ in constraints(model)] == ["0.weight", "1.0.weight"]
    materialize(model)
    assert list(constraints(model)) == []
    assert parametrize.is_parametrized(model[2])
    layer = orthogonal(nn.Linear(4, 4))
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(ValueError, match="weight has other parametrizations over ours; remove those first"):
        materialize(layer)


def test_a_point_under_another_parametrization_stays_one() -> None:
    layer = stiefel(nn.Linear(9, 4))
    before = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    layer(torch.randn(5, 9)).square().sum().backward()
    RiemannianAdam(param_groups(layer), lr=0.1).step()
    assert (layer.weight - before).norm() > 0.1 and defect(layer.weight) < 1e-6


def test_a_gradient_of_the_plain_weight_does_not_survive() -> None:
    module = nn.Linear(9, 4)
    module(torch.randn(2, 9)).sum().backward()
    stiefel(module)
    assert stored(module).grad is None
    assert module.bias.grad is not None


@pytest.mark.parametrize("constraint", ["stiefel", "cayley"])
def test_frozen_weights_stay_frozen_and_optimizers_keep_their_parameter(constraint: str) -> None:
    module = nn.Linear(9, 4)
    module.weight.requires_grad_(False)
    weight = module.weight
    ORTHONORMAL[constraint](module, "weight")
    assert stored(module) is weight and not weight.requires_grad
    assert not materialize(module).weight.requires_grad


# ---- dtypes

ALL_KINDS = [*ORTHONORMAL, "spd"]


def constrained(kind: str, *shape: int) -> Any:
    layer: Any = nn.Linear(shape[0], shape[1])
    return spd(layer, "weight") if kind == "spd" else ORTHONORMAL[kind](layer, "weight")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.bfloat16) for kind in ALL_KINDS), ("cayley", torch.float16), ("cayley", torch.float64)],
)
def test_a_layer_changes_its_dtype_and_keeps_what_it_stores_wide(kind: str, dtype: torch.dtype) -> None:
    module = constrained(kind, 5, 5)
    perturb(module, size=0.01)
    weight, held = module.weight.detach().clone(), stored(module).detach().clone()
    module.to(dtype)
    assert module.weight.dtype == module.bias.dtype == dtype
    assert stored(module).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(stored(module).float(), held)
    torch.testing.assert_close(module.weight.float(), weight, rtol=torch.finfo(dtype).eps, atol=1e-5)
    module(torch.randn(2, 5, dtype=dtype)).sum().backward()
    module.float()
    assert module.weight.dtype == torch.float32
    torch.testing.assert_close(module.weight.detach(), weight, rtol=0, atol=1e-6)  # nothing was lost on the way
    module.to(dtype)
    module.weight = torch.eye(5, dtype=dtype)
    torch.testing.assert_close(module.weight.detach(), torch.eye(5, dtype=dtype), rtol=0, atol=1e-2)


# ---- compilation


# torch's own, where it traces an autograd.Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, (9, 5)) for kind in ORTHONORMAL if kind != "stiefel, cayley"),
        *(("spd", (5, 5)), ("cayley", (5, 5)), ("cayley", (140, 140)), ("polar", (140, 140))),
    ],
)
def test_forward_compiles_to_one_graph(kind: str, shape: tuple[int, int]) -> None:
    module = constrained(kind, *shape)
    perturb(module, size=0.5 / shape[0])
    assert_one_graph(module, torch.randn(3, shape[0]), partial(perturb, size=0.5 / shape[0]))


# ---- symmetric positive definite weights


def test_spd_keeps_a_positive_definite_weight_and_projects_others() -> None:
    layer = nn.Linear(5, 5)
    B = torch.randn(5, 5)
    T = B @ B.T + torch.eye(5)
    layer.weight.data = T.clone()
    for diagonal in ("softplus", "exp"):
        module = spd(copy.deepcopy(layer), "weight", diagonal=diagonal)
        torch.testing.assert_close(module.weight.detach(), T, rtol=1e-5, atol=1e-5)
    value = torch.randn(5, 5)
    module.weight = value
    eigenvalues, V = np.linalg.eigh((value + value.T).double().numpy() / 2)
    expected = (V * np.maximum(eigenvalues, 1e-6 * eigenvalues[-1])) @ V.T
    np.testing.assert_allclose(module.weight.detach().numpy(), expected, rtol=0, atol=1e-5)


def test_spd_of_a_stack_of_matrices() -> None:
    module: Any = spd(Holder(torch.randn(3, 4, 4)), "weight")
    assert module.weight.shape == (3, 4, 4) and (torch.linalg.eigvalsh(module.weight.double()) > 0).all()


@pytest.mark.parametrize("diagonal", ["softplus", "exp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_diagonal_is_inverted_accurately(diagonal: Any, dtype: torch.dtype) -> None:
    layer: Any = nn.Linear(1, 1, dtype=dtype)
    layer.weight.data.fill_(1.0)
    spd(layer, "weight", diagonal=diagonal)
    for value in torch.logspace(-12, 6, 19, dtype=dtype):  # the squares of the diagonal
        layer.weight = value.view(1, 1)
        # the stored logarithm is about -14 at the bottom, and eps of that is relative to the value
        assert layer.weight.item() == pytest.approx(value.item(), rel=64 * torch.finfo(dtype).eps)


# ---- errors


class Holder(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())


UNKNOWN: Any = "svd"
EACH: tuple[Callable[..., Any], ...] = (stiefel, orthogonal, spd)
# the message, the layer, and the constraints that must refuse it
REFUSED: list[tuple[str, Callable[[], nn.Module], Sequence[Callable[..., Any]]]] = [
    (r"Holder.weight to be a matrix .* got \(4,\)", lambda: Holder(torch.randn(4)), EACH),
    ("Linear.bias to be a matrix", lambda: nn.Linear(3, 3), [lambda m, _: stiefel(m, "bias")]),
    ("real floating dtype, got torch.int32", lambda: Holder(torch.ones(4, 4).int()), EACH),
    (
        "Holder.weight to be finite, but it contains NaN or Inf",
        lambda: Holder(torch.eye(4).fill_diagonal_(math.nan)),
        EACH,
    ),
    (
        "Linear has no parameter 'wieght' of its own; its parameters: weight, bias",
        lambda: nn.Linear(3, 3),
        [lambda m, _, put_on=put_on: put_on(m, "wieght") for put_on in EACH],
    ),
    (r"constrained already; call materialize\(module\) first", lambda: stiefel(nn.Linear(3, 3)), [*EACH, equivalence]),
    ("map 'svd'; choose one of polar, qr,", lambda: nn.Linear(3, 3), [lambda m, _: orthogonal(m, map=UNKNOWN)]),
    ("'svd'; choose one of polar, qr,", lambda: nn.Linear(3, 3), [lambda m, _: stiefel(m, retraction=UNKNOWN)]),
    ("'svd'; choose one of softplus, exp", lambda: nn.Linear(3, 3), [lambda m, _: spd(m, "weight", diagonal=UNKNOWN)]),
    (r"Linear.weight to be square for T = L Lᵀ, got \(4, 3\)", lambda: nn.Linear(3, 4), [spd]),
    ("positive eigenvalue", lambda: Holder(-torch.eye(3)), [spd]),
]


def snapshot(module: nn.Module) -> dict[str, Any]:
    return {
        "class": type(module),
        "keys": list(module.state_dict()),
        "values": [(t.dtype, t.shape, t.nan_to_num(7.0).tolist()) for t in module.state_dict().values()],
        "parameters": [id(p) for p in module.parameters()],
        "modules": [type(m) for m in module.modules()],
    }


@pytest.mark.parametrize(("message", "make", "refusing"), REFUSED)
def test_what_cannot_be_constrained_is_refused_and_left_as_it_was(
    message: str, make: Callable[[], nn.Module], refusing: Sequence[Callable[..., Any]]
) -> None:
    for constrain in refusing:
        module = make()
        before = snapshot(module)
        with pytest.raises(ValueError, match=message):
            constrain(module, "weight")
        assert snapshot(module) == before


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_refused_assignment_leaves_the_weight(kind: str) -> None:
    module = constrained(kind, 5, 5)
    perturb(module)
    before = snapshot(module)
    for wrong in (
        torch.randn(4, 5),
        *(torch.full((5, 5), bad) for bad in (math.nan, math.inf)),
        torch.ones(5, 5).int(),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            module.weight = wrong
        assert snapshot(module) == before


# ---- around the edges of registering and taking off

SHAPED: dict[str, Callable[[], nn.Module]] = {
    "wide": lambda: nn.Linear(9, 5),
    "tall": lambda: nn.Linear(5, 9),
    "convolution": lambda: nn.Conv1d(4, 8, 3),
    "bfloat16": lambda: nn.Linear(9, 5, dtype=torch.bfloat16),
}


EDGES = [("wide", stiefel), ("wide", isospectral), *((shaped, orthogonal) for shaped in SHAPED)]


@pytest.mark.parametrize(("shaped", "constrain"), EDGES)
def test_earlier_losses_are_alive(shaped: str, constrain: Callable[..., nn.Module]) -> None:
    module: Any = SHAPED[shaped]()
    earlier = module.weight.square().sum()
    constrain(module)
    assert all(p.dtype == torch.float32 for p in module.parametrizations.parameters())
    x = torch.randn(2, module.weight.shape[1], *[6] * (shaped == "convolution")).to(module.weight.dtype)
    loss = module(x).square().mean()
    loss.backward()
    materialize(module)
    module(x).square().mean().backward()
    assert module.weight.grad.shape == module.weight.shape
    assert loss.isfinite() and earlier.isfinite()  # held to here


@pytest.mark.parametrize("constrain", [low_rank, isospectral, equivalence, stiefel, orthogonal])
def test_constrained_in_inference_mode_it_can_be_trained(constrain: Any) -> None:
    module = nn.Linear(4, 6)
    with torch.inference_mode():
        constrain(module)
    module(torch.randn(2, 4)).sum().backward()
    RiemannianAdam(module.parameters()).step()


@pytest.mark.parametrize("map", ["stiefel", "polar", "cayley"])
def test_materialized_in_inference_mode_it_can_be_trained(map: Any) -> None:
    module = stiefel(nn.Linear(4, 6)) if map == "stiefel" else orthogonal(nn.Linear(4, 6), map=map)
    with torch.inference_mode():
        materialize(module)
    module(torch.randn(2, 4)).sum().backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize("map", ["polar", "cayley"])
def test_a_weight_of_another_dtype_is_assigned_as_one_of_the_layers(map: Any) -> None:
    module = orthogonal(nn.Linear(4, 6), map=map)
    weight = torch.linalg.qr(torch.randn(6, 4, dtype=torch.float64))[0]
    module.weight = weight
    torch.testing.assert_close(module.weight.detach(), weight.float())


def test_weights_that_no_constraint_can_keep_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_norm=0\.1"):
        stiefel(nn.Embedding(20, 4, max_norm=0.1))
    with pytest.raises(ValueError, match="run the module on some input first"):
        orthogonal(nn.LazyLinear(5))
    normed = parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="remove_parametrizations of torch"):
        stiefel(normed)


@pytest.mark.parametrize("put_on", [stiefel, orthogonal, equivalence], ids=lambda put_on: put_on.__name__)
def test_a_pickled_model_says_what_works_instead(put_on: Any) -> None:
    model = nn.Sequential(put_on(nn.Linear(6, 6)), nn.Linear(6, 2))
    for dump in (lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(model)):
        with pytest.raises(RuntimeError, match=r"cannot be pickled.*model\.state_dict\(\).*materialize"):
            dump()
    x = torch.randn(3, 6)
    plain = pickle.loads(pickle.dumps(materialize(copy.deepcopy(model))))  # what it names works
    torch.testing.assert_close(plain(x), model(x))


@pytest.mark.parametrize("remove", [materialize, partial(parametrize.remove_parametrizations, tensor_name="weight")])
def test_a_layer_without_its_constraint_loads_and_pickles_as_any(remove: Any) -> None:
    layer, other = remove(stiefel(nn.Linear(4, 6))), nn.Linear(4, 6)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer.weight, other.weight)
    assert remove is not materialize or b"manifold_tying" not in pickle.dumps(layer)


@pytest.mark.parametrize("put_on", [orthogonal, partial(equivalence, block_size=2)])
def test_layers_of_one_class_are_cached_apart(put_on: Any) -> None:
    first = put_on(nn.Linear(4, 4))
    layers = [first, copy.deepcopy(first), put_on(nn.Linear(4, 4))]
    layers[1].weight = torch.randn(4, 4)
    expected = [layer.weight for layer in layers]
    with parametrize.cached():
        for layer, weight in zip(layers, expected, strict=True):
            assert torch.equal(layer.weight, weight) and layer.weight is layer.weight
        layers[0].weight = expected[1].detach()
        torch.testing.assert_close(layers[0].weight, expected[1])


def test_reset_parameters_keeps_its_signature() -> None:
    class Own(nn.Linear):
        def reset_parameters(self, gain: float = 1.0) -> Any:
            nn.init.orthogonal_(self.weight, gain)
            return f"gain {gain}"

    layer: Any = stiefel(Own(4, 6))
    before = layer.weight.detach().clone()
    assert layer.reset_parameters(gain=2.0) == "gain 2.0"
    assert defect(layer.weight) < 1e-5 and not torch.allclose(layer.weight, before, atol=0.1)


def test_a_point_stays_one_when_torch_swaps_tensors() -> None:
    layer = stiefel(nn.Linear(4, 6))
    uses: list[Callable[[], Any]] = [
        lambda: layer.load_state_dict(layer.state_dict()),
        lambda: setattr(layer, "weight", torch.randn(6, 4)),
    ]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for use in uses:
            use()
            assert isinstance(manifold_of(stored(layer)), Stiefel)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
