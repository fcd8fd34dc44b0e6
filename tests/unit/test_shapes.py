"""Shapes of arguments and results: a table of jaxtyping signatures, which beartype holds while the functions run.

The package does not name jaxtyping: where that is not installed, a user's mypy would take every such tensor for Any.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype
from torch import Tensor

import manifold_tying as mt
from manifold_tying import linalg

FLOAT: Any = jaxtyping.Float
PAIR: Any = tuple
TALL, SQUARE, BATCH = FLOAT[Tensor, "*m n p"], FLOAT[Tensor, "*m p p"], FLOAT[Tensor, "*m"]
MANIFOLDS = {mt.Stiefel: TALL, mt.Sphere: TALL, mt.SPD: SQUARE}


def tall(*shape: int) -> Tensor:
    """Orthonormal columns, (*m, n, p)."""
    return torch.linalg.qr(torch.randn(shape))[0]


def skew(*shape: int) -> Tensor:
    A = torch.randn(*shape[:-2], shape[-1], shape[-1]) / 10
    return A - A.mT


def spd(*shape: int) -> Tensor:
    return torch.linalg.matrix_exp(skew(*shape) @ skew(*shape).mT)


def signature(function: Callable[..., Any], result: Any, *tensors: Any) -> dict[str, Any]:
    """Annotations: the first parameters are the tensors, after self."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return {**dict(zip(names, tensors, strict=False)), "return": result}


# function: what it returns, the types of its tensors, and arguments from a shape (*m, n, p)
LINALG: dict[Callable[..., Any], tuple[Any, tuple[Any, ...], Callable[..., tuple[Any, ...]]]] = {
    linalg.polar: (PAIR[TALL, SQUARE], (TALL,), lambda *s: (tall(*s),)),
    linalg.orthonormalize: (TALL, (TALL,), lambda *s: (tall(*s), "qr")),
    linalg.reorthonormalize: (TALL, (TALL,), lambda *s: (tall(*s),)),
    linalg.reorthonormalize_: (TALL, (TALL,), lambda *s: (tall(*s),)),
    linalg.orthonormalize_rows_: (TALL, (TALL,), lambda *s: (tall(*s), lambda G: G)),
    linalg.defect: (jaxtyping.Float64[Tensor, "*m"], (TALL,), lambda *s: (tall(*s),)),
    linalg.msign: (TALL, (TALL,), lambda *s: (tall(*s),)),
    linalg.tangent_msign: (TALL, (TALL, TALL), lambda *s: (tall(*s), tall(*s), 2)),
    linalg.cayley_at: (TALL, (TALL, TALL), lambda *s: (tall(*s), tall(*s))),
    linalg.cayley_curve: (TALL, (TALL, TALL), lambda *s: (tall(*s), tall(*s))),
    linalg.cayley: (SQUARE, (SQUARE,), lambda *s: (skew(*s),)),
    linalg.cayley_neumann: (SQUARE, (SQUARE,), lambda *s: (skew(*s),)),
    linalg.sinkhorn: (SQUARE, (SQUARE,), lambda *s: (skew(*s),)),
    linalg.orthostochastic: (SQUARE, (SQUARE,), lambda *s: (skew(*s),)),
    linalg.spd_log: (SQUARE, (SQUARE,), lambda *s: (spd(*s),)),
    linalg.skew: (
        FLOAT[Tensor, "*m {b} {b}"],
        (FLOAT[Tensor, "*m {b*(b-1)//2}"],),
        lambda *s: (torch.randn(*s[:-2], s[-1] * (s[-1] - 1) // 2), s[-1]),
    ),
}
# method: what it returns, and how many tensors it takes; P is a point's type
POINTS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "projx": (lambda P: P, 1),
    "proju": (lambda P: P, 2),
    "egrad2rgrad": (lambda P: P, 2),
    "retr": (lambda P: P, 2),
    "expmap": (lambda P: P, 2),
    "transp": (lambda P: P, 3),
    "inner": (lambda P: BATCH, 2),
    "norm": (lambda P: BATCH, 2),
    "dist": (lambda P: BATCH, 2),
    "logmap": (lambda P: P, 2),
}


def held(function: Callable[..., Any], annotations: dict[str, Any]) -> Callable[..., Any]:
    """A copy of the function with these annotations, which are checked in every call."""
    f: Any = function
    copy = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = f.__kwdefaults__, annotations
    checked: Callable[..., Any] = jaxtyping.jaxtyped(copy, typechecker=beartype)
    return checked


SHAPES = [(5, 3), (4, 4), (2, 5, 3), (3, 1, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", LINALG, ids=lambda f: f.__name__)
def test_functions_have_their_shapes(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    result, tensors, arguments = LINALG[function]
    held(function, signature(function, result, *tensors))(*arguments(*shape))


def test_the_table_has_every_function() -> None:
    public = {f for name, f in vars(linalg).items() if name[0] != "_" and inspect.isfunction(f)}
    assert public == set(LINALG)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", MANIFOLDS, ids=lambda kind: kind.__name__)
def test_methods_of_manifolds_have_their_shapes(kind: Any, shape: tuple[int, ...]) -> None:
    point = MANIFOLDS[kind]
    x = spd(*shape) if kind is mt.SPD else kind().projx(torch.randn(shape))
    checked = 0
    for name, (result, count) in POINTS.items():
        ours = (vars(base) for base in kind.__mro__ if base.__module__.startswith("manifold_tying."))
        if method := next((own[name] for own in ours if name in own), None):
            u = x if name in ("dist", "logmap", "projx") else kind().proju(x, x) / 10
            held(method, signature(method, result(point), *[point] * count))(kind(), x, *[u] * (count - 1))
            checked += 1
    assert checked >= 6


def test_wrong_shapes_are_noticed() -> None:
    X = tall(5, 3)
    right = signature(linalg.cayley_at, TALL, TALL, TALL)
    with pytest.raises(jaxtyping.TypeCheckError, match="Y"):
        held(linalg.cayley_at, right)(X, tall(5, 2))
    for function, wrong in ((linalg.polar, PAIR[TALL, TALL]), (linalg.msign, SQUARE), (linalg.defect, TALL)):
        with pytest.raises(jaxtyping.TypeCheckError, match="return"):
            held(function, signature(function, wrong, TALL))(X)
