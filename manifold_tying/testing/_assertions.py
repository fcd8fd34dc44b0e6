"""Assertions with tolerances derived from dtype, size and condition number."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from manifold_tying import linalg
from manifold_tying.precision import sym


def rounding(dtype: torch.dtype, size: int, condition: float = 1.0) -> float:
    """16 ε √size κ: the rounding error allowed in an entry of order 1 that is a sum of ``size`` products.

    The error of a sum of n products grows like √n ε (Higham and Mary 2019). A problem of condition κ amplifies errors in its
    data by κ. The factor 16 covers a chain of several such operations.
    """
    return float(16 * torch.finfo(dtype).eps * max(size, 1) ** 0.5 * condition)


def _require(error: Tensor | float, allowed: float, what: str) -> None:
    """AssertionError unless error <= allowed; NaN fails."""
    error = float(torch.as_tensor(error).max()) if torch.as_tensor(error).numel() else 0.0
    if not error <= allowed:
        raise AssertionError(f"{what} is {error:.3g}; rounding allows {allowed:.3g}")


def assert_equal(actual: Iterable[Tensor], expected: Iterable[Tensor], what: str) -> None:
    """Each tensor is equal, bit for bit, to its counterpart."""
    for a, b in zip(actual, expected, strict=True):
        if not torch.equal(a, b):
            raise AssertionError(f"{what}: the difference is {float((a - b).abs().max()):.3g}")


def assert_close(actual: Tensor, expected: Tensor, what: str, condition: float = 1.0) -> None:
    """The largest difference is at most :func:`rounding` times max(1, largest entry of ``expected``)."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: expected the shape {tuple(expected.shape)}, got {tuple(actual.shape)}")
    if actual.numel():
        wide = actual.detach().double(), expected.detach().double()
        size = max(1.0, wide[1].abs().max().item())
        dtype = min(actual.dtype, expected.dtype, key=lambda dtype: torch.finfo(dtype).bits)
        rows = actual.shape[-1] if actual.ndim else 1
        _require((wide[0] - wide[1]).abs().max() / size, rounding(dtype, rows, condition), f"{what}: the difference")


def assert_gradient(function: Callable[[], Tensor], inputs: Sequence[Tensor]) -> None:
    """The Jacobian of function() in float64 inputs, which it reads, is made of difference quotients to 1e-5."""
    try:
        gradcheck(lambda *_: function(), list(inputs), rtol=1e-5, atol=1e-6, check_undefined_grad=False)
    except GradcheckError as error:
        raise AssertionError(f"the gradient is not the difference quotient: {error}") from None


def assert_orthonormal(X: Tensor) -> None:
    """Orthonormal columns (rows of a wide X) of X (..., n, p): the defect ‖XᵀX - I‖_F / √p is at most :func:`rounding` (n)."""
    _require(linalg.defect(X.detach()), rounding(X.dtype, max(X.shape[-2:])), "the defect ‖XᵀX - I‖_F / √p")


def assert_spd(T: Tensor) -> None:
    """T (..., d, d) is symmetric to rounding and its eigenvalues are positive."""
    wide = T.detach().double()
    size = wide.abs().amax().item() if wide.numel() else 0.0
    allowed = rounding(T.dtype, T.shape[-1])
    _require((wide - wide.mT).abs().max() / max(size, 1e-300), allowed, "the asymmetry ‖T - Tᵀ‖_max / ‖T‖_max")
    lowest = torch.linalg.eigvalsh(sym(wide))[..., 0].min().item()
    # Rounding can make an eigenvalue below the error of T negative.
    if not lowest > -allowed * size or size == 0:
        raise AssertionError(f"the smallest eigenvalue is {lowest:.3g}, expected a positive one")


def assert_interface_consistent(E: Tensor, W_out: Tensor) -> None:
    """W_out E = I to rounding: ‖W_out E - I‖_F / √d at most :func:`rounding` (V) times ‖W_out‖ ‖E‖ (PIT, equation 6)."""
    wide = W_out.detach().double(), E.detach().double()
    for name, table in zip(("W_out", "E"), wide, strict=True):
        if not torch.isfinite(table).all():
            raise AssertionError(f"{name} contains NaN or Inf; T or its inverse may exceed the range of {E.dtype}")
    d = E.shape[-1]
    condition = float(torch.linalg.matrix_norm(wide[0], 2) * torch.linalg.matrix_norm(wide[1], 2))
    error = torch.linalg.matrix_norm(wide[0] @ wide[1] - torch.eye(d, dtype=torch.float64, device=E.device)) / d**0.5
    _require(error, rounding(E.dtype, E.shape[0], condition), "‖W_out E - I‖_F / √d")


def assert_same_spectrum(actual: Tensor, expected: Tensor) -> None:
    """Both matrices (..., n, p) have the same singular values, like W = R W0 P and W0 with orthogonal R and P (POET)."""
    if actual.shape != expected.shape:
        raise AssertionError(f"expected the shape {tuple(expected.shape)}, got {tuple(actual.shape)}")
    ours, theirs = (torch.linalg.svdvals(a.detach().double()) for a in (actual, expected))
    allowed = rounding(actual.dtype, max(actual.shape[-2:]))
    _require((ours - theirs).abs().max() / theirs.max(), allowed, "the largest relative difference of singular values")
