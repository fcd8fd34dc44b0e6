"""Tensor functions against scipy, numpy and float64 formulas."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import conditioned, decompositions, orthonormal, scipy_polar
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from manifold_tying import linalg, precision
from manifold_tying.testing import tall_shapes

METHODS = get_args(linalg.Orthonormalization)
seeds = st.integers(0, 2**31 - 1)
settings.register_profile("reproducible", max_examples=40, deadline=None, derandomize=True, database=None)
reproducible = settings.get_profile("reproducible")


def skew_of_norm(b: int, norm: float, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    A = torch.randn(b, b, dtype=torch.float64)
    A = A - A.mT
    return A * (norm / torch.linalg.matrix_norm(A, 2))


# ---- polar


@reproducible
@given(tall_shapes(), st.floats(0, 7), st.sampled_from([1e-20, 1e-3, 1.0, 1e20]), seeds, st.booleans())
def test_polar_is_scipys(shape: tuple[int, ...], log_condition: float, scale: float, seed: int, wide: bool) -> None:
    condition = 10**log_condition
    dtype = torch.float64 if wide else torch.float32
    Y = (conditioned(shape, condition, seed) * scale).to(dtype)
    U, H = linalg.polar(Y)
    expected_U, expected_H = scipy_polar(Y)
    assert U.dtype == H.dtype == dtype
    assert U.is_contiguous() and H.is_contiguous()
    # U moves by eps times the condition. float32 goes by the Gram matrix only up to condition 57, and is exact after that;
    # in float64 scipy itself is no better than eps times the condition.
    tolerance = 1e-13 + 1e-14 * condition if wide else 1e-5
    np.testing.assert_allclose(U.numpy(), expected_U, rtol=0, atol=tolerance)
    # h comes from its square: eps ‖H‖² / h, with condition at most 57 in float32 and 8e3 in float64 before the SVD takes over
    np.testing.assert_allclose(H.numpy() / scale, expected_H / scale, rtol=0, atol=1e-11 if wide else 1e-5)
    assert linalg.defect(U).max() <= (1e-13 if wide else 1e-6)
    assert torch.equal(H, H.mT)


def test_polar_where_the_squares_leave_float32() -> None:
    for scale in (1e-44, 1e-38, 1e-30, 1e-22, 1e-21, 1e-19, 1e18, 1e19, 1e30):
        Y = (conditioned((30, 5), 3.0) * scale).float()
        U, H = linalg.polar(Y)
        expected_U, expected_H = scipy_polar(Y)
        assert linalg.defect(U) <= 1e-6
        # Y is rounded to multiples of 1.4e-45 at the very bottom, and so is the H that comes back.
        np.testing.assert_allclose(H.double().numpy(), expected_H, rtol=0, atol=2e-6 * scale + 2e-45)
        if scale > 1e-40:
            np.testing.assert_allclose(U.numpy(), expected_U, rtol=0, atol=1e-5)


def deficient(kind: str, dtype: torch.dtype) -> Tensor:
    Y = conditioned((2, 12, 4), 5.0)
    if kind == "zero":
        Y = torch.zeros_like(Y)
    elif kind == "rank one":
        Y = Y[..., :1] @ torch.ones(2, 1, 4, dtype=torch.float64)
    elif kind == "zero column":
        Y[..., 2] = 0
    elif kind == "equal columns of one":
        Y[0, :, 1] = Y[0, :, 0]
    elif kind == "duplicated rows":
        Y = Y[:, :3].repeat(1, 4, 1)  # 12 rows of which 3 differ: rank 3
    return Y.to(dtype)


@pytest.mark.parametrize("kind", ["zero", "rank one", "zero column", "equal columns of one", "duplicated rows"])
def test_rank_deficient_matrices_have_orthonormal_factors(kind: str) -> None:
    for dtype in (torch.float32, torch.float64):
        Y = deficient(kind, dtype)
        smallest = torch.linalg.svdvals(Y.double())[..., -1].min()
        assert smallest < 1e-6  # else this tests nothing
        U, H = linalg.polar(Y)
        eps = torch.finfo(dtype).eps
        assert linalg.defect(U).max() <= 10 * eps
        np.testing.assert_allclose(H.numpy(), scipy_polar(Y)[1], rtol=0, atol=20 * eps)  # H is unique, U is not
        np.testing.assert_allclose((U @ H).numpy(), Y.numpy(), rtol=0, atol=20 * eps)
        assert linalg.defect(linalg.orthonormalize(Y, "qr")).max() <= 10 * eps
        assert linalg.defect(linalg.reorthonormalize(Y)).max() <= 10 * eps


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(500, 48), (3, 40, 7), (80, 80)])
def test_defect_in_float32(method: Any, shape: tuple[int, ...]) -> None:
    for condition in (1.0, 40.0, 1e3, 1e7):
        Y = conditioned(shape, condition, seed=1).float()
        assert linalg.defect(linalg.orthonormalize(Y, method)).max() <= 1e-6


@pytest.mark.parametrize(("shape", "small"), [((300, 66), 0.02), ((300, 130), 0.1)])
def test_defect_in_float32_with_few_small_singular_values(shape: tuple[int, int], small: float) -> None:
    """Their squares are lost in the Gram matrix, though it is near the identity on average."""
    Q, V = orthonormal(*shape), orthonormal(shape[1], shape[1])
    singular_values = torch.ones(shape[1], dtype=torch.float64)
    singular_values[:4] = small
    X = linalg.orthonormalize(((Q * singular_values) @ V).float())
    assert linalg.defect(X) <= 7e-7
    torch.testing.assert_close(X.double(), Q @ V, rtol=0, atol=1e-5)


def test_no_matrices_at_all() -> None:
    for shape, method in itertools.product(((0, 5, 3), (0, 90, 80)), METHODS):
        assert linalg.orthonormalize(torch.zeros(shape), method).shape == shape


def test_the_defect_of_a_wide_matrix_is_that_of_its_rows() -> None:
    X = torch.randn(3, 2, 5, dtype=torch.float64)
    expected = [np.linalg.norm(A @ A.T - np.eye(2)) / 2**0.5 for A in X.numpy()]
    np.testing.assert_allclose(linalg.defect(X).numpy(), expected, rtol=1e-14)


def test_defect_is_the_formula_in_float64() -> None:
    X = conditioned((2, 9, 3), 4.0)
    expected = [np.linalg.norm(x.T @ x - np.eye(3)) / np.sqrt(3) for x in X.numpy()]
    np.testing.assert_allclose(linalg.defect(X).numpy(), expected, rtol=1e-14)
    assert linalg.defect(torch.eye(7, 5, dtype=torch.bfloat16)) == 0
    Q = orthonormal(200, 8)
    assert linalg.defect(Q.float()) < 1e-7 < 1e-4 < linalg.defect(Q.bfloat16())  # sees what bfloat16 loses
    assert linalg.defect(Q.float()).dtype == torch.float64


# ---- polar by products


def by_products(Y: Tensor) -> bool:
    return not decompositions(lambda: linalg.polar(Y))


@pytest.mark.parametrize(
    ("shape", "condition", "scale"),
    [
        ((80, 80), 2.0, 1.0),
        ((200, 72), 5.0, 1.0),
        ((200, 72), 1.0, 1e9),
        ((200, 72), 1.01, 1e-9),
        ((2, 3, 70, 66), 1.3, 1.0),
    ],
)
def test_polar_by_products_is_scipys(shape: tuple[int, ...], condition: float, scale: float) -> None:
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 4e-15)):
        Y = (conditioned(shape, condition) * scale).to(dtype)
        assert by_products(Y)
        U, H = linalg.polar(Y)
        expected_U, expected_H = scipy_polar(Y)
        np.testing.assert_allclose(U.numpy(), expected_U, rtol=0, atol=bound)
        np.testing.assert_allclose(H.numpy() / scale, expected_H / scale, rtol=0, atol=2 * bound)
        assert linalg.defect(U).max() <= bound / 2
        assert torch.equal(H, H.mT) and U.is_contiguous() and H.is_contiguous()


@pytest.mark.parametrize("shape", [(80, 80), (200, 72)])
def test_float32_gradient_by_products_is_that_through_an_svd_in_float64(shape: tuple[int, ...]) -> None:
    Y = conditioned(shape, 2.0)
    weights = torch.randn(shape, dtype=torch.float64), torch.randn(shape[1], shape[1], dtype=torch.float64)

    def gradient(factors: Callable[[Tensor], tuple[Tensor, Tensor]], Y: Tensor) -> Tensor:
        leaf = Y.clone().requires_grad_()
        return torch.autograd.grad(factors(leaf), leaf, [w.to(Y.dtype) for w in weights])[0].double()

    def by_svd(Y: Tensor) -> tuple[Tensor, Tensor]:
        U, h, Vh = torch.linalg.svd(Y, full_matrices=False)
        return U @ Vh, (Vh.mT * h) @ Vh

    expected = gradient(by_svd, Y)
    for dtype, bound in ((torch.float32, 2e-6), (torch.float64, 1e-11)):
        assert by_products(Y.to(dtype))
        assert (gradient(linalg.polar, Y.to(dtype)) - expected).norm() <= bound * expected.norm()


def test_gradient_by_products_is_linear_down_to_nothing_and_passes_nan_on() -> None:
    shape = (200, 72)
    Y, weights = conditioned(shape, 1.5).float().requires_grad_(), torch.randn(shape)

    def gradient(size: float) -> Tensor:
        return torch.autograd.grad((linalg.polar(Y)[0] * (size * weights)).sum(), Y)[0]

    for size in (1e-30, 1e25):
        torch.testing.assert_close(gradient(size) / size, gradient(1.0), rtol=1e-4, atol=1e-5)
    assert torch.equal(gradient(0.0), torch.zeros(shape))
    for bad in (math.nan, math.inf):  # a gradient scaler looks for these
        assert not gradient(bad).isfinite().any()


# ---- gradients


def with_singular_values(*h: float) -> Tensor:
    torch.manual_seed(0)
    return (orthonormal(5, 3) * torch.tensor(h, dtype=torch.float64)) @ orthonormal(3, 3).mT


POINTS = {
    "tall": lambda: conditioned((6, 3), 4.0),
    "very tall": lambda: conditioned((13, 3), 4.0),
    "very tall batch": lambda: conditioned((2, 9, 2), 3.0),
    "square": lambda: conditioned((4, 4), 4.0),
    "column": lambda: conditioned((5, 1), 1.0),
    "batch": lambda: conditioned((2, 2, 4, 2), 3.0),
    "eye": lambda: torch.eye(4, dtype=torch.float64),
    "tall eye": lambda: torch.eye(5, 3, dtype=torch.float64),
    "equal singular values": lambda: with_singular_values(2.0, 2.0, 1.0),
    "through the SVD": lambda: with_singular_values(1e4, 10.0, 1.0),
}


@pytest.mark.parametrize("point", [name for name in POINTS if not name.startswith("very")])
def test_gradient_of_both_polar_factors(point: str) -> None:
    Y = POINTS[point]().requires_grad_()
    assert torch.autograd.gradcheck(lambda Y: linalg.polar(Y)[0], Y)
    assert torch.autograd.gradcheck(lambda Y: linalg.polar(Y)[1], Y)


@pytest.mark.parametrize("point", ["tall", "very tall", "very tall batch", "square", "column"])
def test_gradient_of_orthonormalize(point: str) -> None:
    assert torch.autograd.gradcheck(lambda Y: linalg.orthonormalize(Y, "qr"), POINTS[point]().requires_grad_())


def test_gradient_of_orthonormalize_where_cholesky_fails() -> None:
    Y, weights = conditioned((9, 4), 1e10).requires_grad_(), torch.randn(9, 4, dtype=torch.float64)
    Q, R = torch.linalg.qr(Y)
    (expected,) = torch.autograd.grad(Q * R.diagonal().sign(), Y, weights)
    (gradient,) = torch.autograd.grad(linalg.orthonormalize(Y, "qr"), Y, weights)
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("method", METHODS)
def test_float32_gradient_is_that_of_float64(method: Any) -> None:
    Y, weights = conditioned((60, 8), 10.0), torch.randn(60, 8, dtype=torch.float64)
    gradients: list[Tensor] = []
    for dtype in (torch.float32, torch.float64):
        leaf = Y.to(dtype).requires_grad_()
        gradients += torch.autograd.grad(linalg.orthonormalize(leaf, method), leaf, weights.to(dtype))
    # eps times the square of the condition, once through the factor and once through the inverse in the formula
    assert (gradients[0] - gradients[1]).norm() <= 1.2e-7 * 100 * gradients[1].norm()


def test_gradient_is_finite_where_the_matrix_is_singular() -> None:
    for kind in ("rank one", "equal columns of one", "duplicated rows"):
        Y = deficient(kind, torch.float64).requires_grad_()
        linalg.polar(Y)[1].sum().backward()
        assert Y.grad is not None and Y.grad.isfinite().all(), kind


# ---- QR


@reproducible
@given(tall_shapes(), st.floats(0, 10), seeds)
def test_qr_is_numpys_up_to_signs(shape: tuple[int, ...], log_condition: float, seed: int) -> None:
    Y = conditioned(shape, 10**log_condition, seed)
    Q = linalg.orthonormalize(Y, "qr")
    R = (Q.mT @ Y).numpy()
    assert Q.is_contiguous()
    assert (np.diagonal(R, axis1=-2, axis2=-1) > 0).all()
    expected, upper = np.linalg.qr(Y.numpy())
    signs = np.sign(np.diagonal(upper, axis1=-2, axis2=-1))[..., None, :]
    np.testing.assert_allclose(Q.numpy(), expected * signs, rtol=0, atol=1e-13 + 1e-14 * 10**log_condition)
    np.testing.assert_allclose(np.tril(R, -1), 0, rtol=0, atol=1e-13)


# ---- reorthonormalize


@pytest.mark.parametrize("shape", [(7, 7), (300, 32), (300, 48), (2, 3, 10, 4)])
def test_reorthonormalize_after_a_tangent_step(shape: tuple[int, ...]) -> None:
    X = orthonormal(*shape)
    U = torch.randn(shape, dtype=torch.float64)
    U = U - X @ precision.sym(X.mT @ U)
    sizes, dtypes = (0.0, 1e-3, 0.3, 1.8, 3.0, 30.0, 1e6), ((torch.float32, 1e-6), (torch.float64, 1e-14))
    for size, (dtype, bound) in itertools.product(sizes, dtypes):
        Y = X + U * size / torch.linalg.matrix_norm(U, 2)[..., None, None]
        result = linalg.reorthonormalize(Y.to(dtype))
        assert linalg.defect(result).max() <= bound
        # singular values are between 1 and size, so eps times size
        tolerance = (1 + size) * 20 * torch.finfo(dtype).eps
        np.testing.assert_allclose(result.numpy(), scipy_polar(Y.to(dtype))[0], rtol=0, atol=tolerance)


def test_reorthonormalize_where_one_column_has_moved() -> None:
    for column, size in itertools.product((0, 1, 40, 63), (1.05, 2.0, 30.0)):
        X = torch.eye(300, 64)
        Y = X * torch.ones(64).index_fill(0, torch.tensor(column), size)
        torch.testing.assert_close(linalg.reorthonormalize(Y), X, rtol=0, atol=1e-6)


# ---- Cayley


def test_cayley_is_scipys_solve_and_a_rotation() -> None:
    for b, norm in ((1, 0.0), (2, 0.0), (2, 50.0), (5, 1.0), (16, 0.1)):
        A = skew_of_norm(b, norm) if b > 1 else torch.zeros(1, 1, dtype=torch.float64)
        C, eye = linalg.cayley(A), np.eye(b)
        np.testing.assert_allclose(C.numpy(), scipy.linalg.solve(eye - A.numpy(), eye + A.numpy()), rtol=0, atol=1e-12)
        np.testing.assert_allclose(C.T.numpy() @ C.numpy(), eye, rtol=0, atol=1e-12)
        assert torch.linalg.det(C).item() == pytest.approx(1.0)


def test_cayley_of_an_odd_size_is_orthogonal_at_any_norm() -> None:
    """A is singular there, and in float32 the defect grows to 1e-3."""
    for b, norm in ((129, 1e3), (65, 1e5)):
        assert linalg.defect(linalg.cayley(skew_of_norm(b, norm).float())) < 1e-7


def test_cayley_neumann_is_the_cayley_map_less_its_tail() -> None:
    A = torch.stack([skew_of_norm(6, norm) for norm in (0.05, 0.3, 0.9, 1.5)])
    eye = torch.eye(6, dtype=torch.float64)
    assert torch.equal(linalg.cayley_neumann(A), linalg.cayley_neumann(A, terms=2))
    for terms in range(1, 7):
        expected = linalg.cayley(A) @ (eye - torch.linalg.matrix_power(A, terms + 1))
        np.testing.assert_allclose(linalg.cayley_neumann(A, terms).numpy(), expected.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [0.01, 0.5])
def test_products_in_bfloat16_cost_less_than_what_the_result_is_rounded_by(norm: float) -> None:
    A = skew_of_norm(64, norm).float()
    C, wide = torch.randn(64, 64, dtype=torch.float64), A.double().requires_grad_()
    exact = linalg.cayley_neumann(wide)
    A.requires_grad_()
    low = linalg.cayley_neumann(A, matmul_dtype=torch.bfloat16)
    rounded = low.detach().bfloat16()
    # Off the diagonal, where the rounding is that of 2A.
    off = ~torch.eye(64, dtype=torch.bool)
    unavoidable = (exact.bfloat16().double() - exact)[off].norm()
    assert 0 < (rounded.double() - exact)[off].norm() < (1 + norm) * unavoidable
    (found,) = torch.autograd.grad(low, A, C.float())
    (wanted,) = torch.autograd.grad(exact, wide, C)
    assert 0 < (found - wanted).norm() < norm * 2**-7 * wanted.norm()


@pytest.mark.parametrize(("k", "b", "norm"), [(2, 32, 0.5), (3, 7, 50.0), (1, 150, 3.0), (2, 64, 20.0)])
def test_the_float32_gradient_of_cayley_is_that_of_a_solve_in_float64(k: int, b: int, norm: float) -> None:
    A, (i, j) = torch.stack([skew_of_norm(b, norm, seed) for seed in range(k)]), torch.triu_indices(b, b, 1)
    vector = A[:, i, j].float().requires_grad_()
    C, weights = linalg.cayley(linalg.skew(vector, b)), torch.randn(k, b, b)
    (found,) = torch.autograd.grad((C * weights).sum(), vector)
    wide = vector.detach().double().requires_grad_()
    B, eye = linalg.skew(wide, b), torch.eye(b).double()
    exact = torch.linalg.solve(eye - B, eye + B)
    (expected,) = torch.autograd.grad((exact * weights).sum(), wide)
    torch.testing.assert_close(C.detach().double(), exact.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.autograd.gradgradcheck(linalg.cayley, torch.randn(2, 3, 3).double().requires_grad_())


@pytest.mark.parametrize("f", [linalg.cayley, lambda A: linalg.cayley_neumann(A, 3)])
def test_gradient_of_cayley_maps(f: Callable[[Tensor], Tensor]) -> None:
    v = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: f(linalg.skew(v / 10, 4)), v)


def test_gradient_of_two_terms_is_the_skew_part() -> None:
    A = torch.stack([skew_of_norm(6, 0.5), skew_of_norm(6, 2.0, seed=1)]).requires_grad_()
    weights = torch.randn(2, 6, 6, dtype=torch.float64)
    eye = torch.eye(6, dtype=torch.float64)
    (full,) = torch.autograd.grad(((eye + A) @ (eye + A + A @ A) * weights).sum(), A)
    (ours,) = torch.autograd.grad((linalg.cayley_neumann(A) * weights).sum(), A)
    torch.testing.assert_close(ours, (full - full.mT) / 2, rtol=0, atol=1e-12)
    assert (full - ours).norm() > 0.1 * ours.norm()  # along other directions A would not stay skew


# ---- Cayley around a base


def dense_cayley_at(base: Tensor, Y: Tensor, terms: int | None) -> Tensor:
    """The map by its n x n matrix, for autograd to differentiate."""
    n, p = base.shape[-2:]
    if n == p:
        A = Y.tril(-1) - Y.tril(-1).mT
    else:
        S = base.mT @ Y
        Z = Y - base @ S
        A = (Z @ base.mT - base @ Z.mT + base @ ((S - S.mT) / 2) @ base.mT) / 2
    eye = torch.eye(n, dtype=Y.dtype)
    if terms is None:
        C = torch.linalg.solve(eye - A, eye + A)
    else:
        C = (eye + A) @ sum((torch.linalg.matrix_power(A, i) for i in range(1, terms + 1)), start=eye)
    return base @ C if n == p else C @ base


@pytest.mark.parametrize("terms", [None, 2, 3])
@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (4, 1), (2, 4, 2)])
def test_cayley_at_is_the_dense_formula(shape: tuple[int, ...], terms: int | None) -> None:
    base, Y = orthonormal(*shape), 0.5 * torch.randn(shape, dtype=torch.float64)
    X = linalg.cayley_at(base, Y, terms)
    assert X.is_contiguous()
    torch.testing.assert_close(X, dense_cayley_at(base, Y, terms), rtol=0, atol=1e-12)
    assert terms is not None or linalg.defect(X).max() < 1e-14
    torch.testing.assert_close(linalg.cayley_at(base, torch.zeros_like(Y), terms), base, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda Y: linalg.cayley_at(base, Y, terms), Y.requires_grad_())


@pytest.mark.parametrize("terms", [None, 2])
@pytest.mark.parametrize("shape", [(301, 301), (400, 150)])
def test_large_cayley_at_and_its_gradient(shape: tuple[int, int], terms: int | None) -> None:
    torch.manual_seed(0)
    base, weights = orthonormal(*shape), torch.randn(shape, dtype=torch.float64)
    Y = torch.randn(shape, dtype=torch.float64) / 50  # ‖A‖ is about 0.7

    def both(f: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = Y.to(dtype).requires_grad_()
        X = f(base.to(dtype), leaf, terms)
        return X.detach().double(), torch.autograd.grad(X, leaf, weights.to(dtype))[0].double()

    X, gradient = both(dense_cayley_at, torch.float64)
    for dtype, bound in ((torch.float32, 2e-6), (torch.float64, 1e-14)):
        got, got_gradient = both(linalg.cayley_at, dtype)
        assert (got - X).norm() <= bound * X.norm()
        assert (got_gradient - gradient).norm() <= bound * gradient.norm()


# ---- skew


def test_skew_reads_the_upper_triangle_by_rows() -> None:
    expected = [[0.0, 1.0, 2.0], [-1.0, 0.0, 3.0], [-2.0, -3.0, 0.0]]
    assert linalg.skew(torch.tensor([1.0, 2.0, 3.0]), 3).tolist() == expected
    v = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: linalg.skew(v, 4), v)


def test_a_selective_checkpoint_may_make_the_first_skew_matrix_of_a_size() -> None:
    v = torch.randn(37 * 18, dtype=torch.float64, requires_grad=True)  # of a size that no other test has

    def keep(_: object, operation: object, *args: object, **options: object) -> CheckpointPolicy:
        kept = operation in (torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def loss(v: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(linalg.skew(v, 37)).square().mean()

    contexts = partial(create_selective_checkpoint_contexts, keep)
    (found,) = torch.autograd.grad(checkpoint(loss, v, use_reentrant=False, context_fn=contexts), v)
    assert torch.equal(found, torch.autograd.grad(loss(v), v)[0])


def test_a_function_mode_does_not_reach_later_skew_matrices() -> None:
    class Plus(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            return found + 1 if function in (torch.arange, torch.where) else found

    with Plus():
        linalg.skew(torch.randn(38 * 39 // 2), 39)
    v, (i, j) = torch.randn(38 * 39 // 2), torch.triu_indices(39, 39, 1)
    assert torch.equal(linalg.skew(v, 39)[i, j], v)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_may_make_the_first_skew_matrix_of_a_size() -> None:
    traced = torch.jit.trace(lambda v: linalg.skew(v, 38), (torch.randn(37 * 19),))  # compares with a second call
    v = torch.randn(37 * 19)
    assert torch.equal(traced(v), linalg.skew(v, 38))


# ---- precision

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "polar U": lambda Y: linalg.polar(Y)[0],
    "polar H": lambda Y: linalg.polar(Y)[1],
    "qr": lambda Y: linalg.orthonormalize(Y, "qr"),
    "reorthonormalize": linalg.reorthonormalize,
    "cayley": lambda Y: linalg.cayley(linalg.skew(Y[..., :6, 0], 4)),
    "cayley_neumann": lambda Y: linalg.cayley_neumann(linalg.skew(Y[..., :6, 0] / 4, 4)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_low_precision_is_computed_in_float32_and_rounded_once(function: str) -> None:
    f = FUNCTIONS[function]
    for dtype in (torch.bfloat16, torch.float16):
        Y = torch.randn(2, 40, 6).to(dtype)
        if "neumann" in function:
            Y = Y.double().mul(4).to(dtype)  # so that the division by 4 in bfloat16 loses nothing
        result = f(Y)
        assert result.dtype == dtype
        assert torch.equal(result, f(Y.float()).to(dtype))


@pytest.mark.parametrize("method", METHODS)
def test_autocast_around_the_backward_changes_nothing(method: Any) -> None:
    Y, weights = torch.randn(40, 6), torch.randn(40, 6)

    def gradient() -> Tensor:
        leaf = Y.clone().requires_grad_()
        return torch.autograd.grad((linalg.orthonormalize(leaf, method) * weights).sum(), leaf)[0]

    plain = gradient()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain, gradient())


BACKEND: Any = torch.backends.mkldnn
PRODUCTS = BACKEND.matmul
WAYS: dict[str, Callable[[], None]] = {
    "function": lambda: torch.set_float32_matmul_precision("medium"),
    "attribute": lambda: setattr(PRODUCTS, "fp32_precision", "bf16"),
}


@pytest.fixture(params=WAYS)
def medium_precision(request: pytest.FixtureRequest) -> Iterator[None]:
    """In both ways to set it; torch's older getter raises after the newer one."""
    WAYS[request.param]()
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("medium_precision")
def test_matmul_precision_is_highest_inside_and_restored_after() -> None:
    with precision.full_precision(torch.device("cpu")):
        assert PRODUCTS.fp32_precision == "ieee"
    assert PRODUCTS.fp32_precision == "bf16"
    assert linalg.defect(linalg.polar(torch.randn(200, 32))[0]) <= 1e-6
    assert PRODUCTS.fp32_precision == "bf16"
    with torch.autocast("cpu", torch.bfloat16):
        for method in METHODS:
            with pytest.raises(ValueError, match="NaN or Inf"):
                linalg.orthonormalize(torch.full((4, 2), float("nan")), method)
            assert torch.is_autocast_enabled("cpu") and PRODUCTS.fp32_precision == "bf16"


def test_an_inherited_matmul_precision_stays_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    PRODUCTS.fp32_precision = "none"  # the default, whatever the tests before left there
    monkeypatch.setattr(torch.backends, "fp32_precision", "bf16")
    linalg.polar(torch.randn(200, 32))
    assert PRODUCTS.fp32_precision == "bf16"
    monkeypatch.undo()
    assert PRODUCTS.fp32_precision != "bf16"


# ---- errors


@pytest.mark.parametrize("function", ["polar U", "qr", "reorthonormalize"])
def test_nan_and_infinity_are_refused(function: str) -> None:
    f = FUNCTIONS[function]
    for dtype, bad in itertools.product(
        (torch.float32, torch.float64, torch.bfloat16), (math.nan, math.inf, -math.inf)
    ):
        Y = torch.randn(2, 6, 3).to(dtype)
        f(Y)
        Y[1, 4, 2] = bad
        with pytest.raises(ValueError, match="expected a finite matrix, but it contains NaN or Inf"):
            f(Y)


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "polar of a wide matrix": (lambda: linalg.polar(torch.randn(3, 5)), r"n >= p >= 1, got \(3, 5\); transpose it\?"),
    "polar without columns": (lambda: linalg.polar(torch.randn(3, 0)), r"n >= p >= 1, got \(3, 0\)"),
    "polar of integers": (lambda: linalg.polar(torch.ones(3, 2).long()), "real floating dtype, got torch.int64"),
    "unknown method": (
        lambda: linalg.orthonormalize(torch.randn(3, 2), "svd"),  # type: ignore[arg-type]
        "unknown method 'svd'; choose one of polar, qr",
    ),
    "cayley not square": (lambda: linalg.cayley(torch.randn(3, 2)), r"square matrix \(..., b, b\), got \(3, 2\)"),
    "cayley of integers": (lambda: linalg.cayley(torch.ones(2, 2).int()), "got torch.int32"),
    "half a term": (lambda: linalg.cayley_neumann(torch.zeros(2, 2), 1.5), "integer >= 1, got 1.5"),  # type: ignore[arg-type]
    "skew of too many": (lambda: linalg.skew(torch.zeros(4), 3), "expected 3 entries for b=3, got 4"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_is_wrong(case: str) -> None:
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_size_first_seen_without_gradients_or_values_trains_later() -> None:
    with torch.inference_mode():
        linalg.skew(torch.ones(37 * 18), 37)
    given = torch.ones(41 * 20)
    with FakeTensorMode(allow_non_fake_inputs=True):
        linalg.skew(given, 41)
    for b in (37, 41):
        vector = torch.randn(b * (b - 1) // 2, requires_grad=True)
        (grad,) = torch.autograd.grad(linalg.skew(vector, b).square().sum(), vector)
        torch.testing.assert_close(grad, 4 * vector.detach())
