"""The manifold of symmetric positive definite matrices."""

import torch
from torch import Tensor

from manifold_tying import autograd, linalg, precision
from manifold_tying.manifolds._matrices import Matrices


class SPD(Matrices):
    """S = {X (..., d, d) : X symmetric, X > 0} with the affine-invariant metric <U, V>_X = tr X⁻¹U X⁻¹V.

    A :class:`geoopt.Manifold`. Everything goes through the Cholesky factor X = L Lᵀ. In the coordinates L⁻¹U L⁻ᵀ the metric is
    Euclidean, so transport is an isometry, computed by triangular solves. The retraction X + U + U X⁻¹U / 2 is of second
    order and positive definite for every symmetric U.
    """

    name = "SPD"

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """The symmetric part of U."""
        return precision.sym(u)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """X sym(G) X, the gradient of the affine-invariant metric."""
        with precision.full_precision(x.device):
            return precision.sym(x @ precision.sym(u) @ x)

    def projx(self, x: Tensor) -> Tensor:
        """Nearest symmetric matrix with eigenvalues at least 1e-6 (float32) or 1e-12 (float64) times the largest."""
        return nearest_spd(x)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """X + U + U X⁻¹U / 2."""
        with precision.full_precision(x.device):
            return precision.sym(x + u + u @ torch.cholesky_solve(u, torch.linalg.cholesky(x)) / 2)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """L exp(L⁻¹U L⁻ᵀ) Lᵀ, the geodesic."""
        with precision.full_precision(x.device):
            L = torch.linalg.cholesky(x)
            return precision.sym(L @ torch.linalg.matrix_exp(whiten(L, u)) @ L.mT)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """L log(L⁻¹Y L⁻ᵀ) Lᵀ, the inverse of :meth:`expmap`."""
        with precision.full_precision(x.device):
            L = torch.linalg.cholesky(x)
            return precision.sym(L @ linalg.spd_log(whiten(L, y)) @ L.mT)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Geodesic distance ‖log(L⁻¹Y L⁻ᵀ)‖_F, shape (...)."""
        log = linalg.spd_log(whiten(torch.linalg.cholesky(x), y))
        distance: Tensor = torch.linalg.vector_norm(log, dim=(-2, -1), keepdim=keepdim)
        return distance

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """M V Mᵀ with M = L_y L_x⁻¹, an isometry between the tangent spaces."""
        with precision.full_precision(x.device):
            L_y = torch.linalg.cholesky(y)
            return precision.sym(L_y @ whiten(torch.linalg.cholesky(x), v) @ L_y.mT)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """tr X⁻¹U X⁻¹V, shape (...)."""
        L = torch.linalg.cholesky(x)
        a = whiten(L, u)
        return (a * (a if v is None else whiten(L, v))).sum((-1, -2), keepdim=keepdim)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """√<U, U>_X, shape (...); its gradient at 0 is 0."""
        whitened = whiten(torch.linalg.cholesky(x), u)
        norm: Tensor = torch.linalg.vector_norm(whitened, dim=(-2, -1), keepdim=keepdim)
        return norm

    def _from_normal(self, x: Tensor) -> Tensor:
        """exp of a random symmetric matrix, N(0, 1) entries divided by √d: the condition number is some tens for any d."""
        point: Tensor = torch.linalg.matrix_exp((x + x.mT) / (2 * x.shape[-1]) ** 0.5)
        return point

    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        ok, reason = super()._check_shape(shape, name)
        if ok and shape[-1] != shape[-2]:
            return False, f"`{name}` must be square, got {tuple(shape)}"
        return ok, reason

    def _check_point_on_manifold(self, x: Tensor, *, atol: float, rtol: float) -> tuple[bool, str | None]:
        if not torch.allclose(x, x.mT, atol=atol, rtol=rtol):
            return False, f"X is not symmetric with atol={atol}, rtol={rtol}"
        if x.numel() == 0:
            return True, None
        smallest = torch.linalg.eigvalsh(x).min().item()
        return (True, None) if smallest > 0 else (False, f"the smallest eigenvalue is {smallest:.1e}, not > 0")

    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float, rtol: float) -> tuple[bool, str | None]:
        ok = torch.allclose(u, u.mT, atol=atol, rtol=rtol)
        return (True, None) if ok else (False, f"U is not symmetric with atol={atol}, rtol={rtol}")


def whiten(L: Tensor, U: Tensor) -> Tensor:
    """L⁻¹ U L⁻ᵀ for lower triangular L and symmetric U."""
    half = torch.linalg.solve_triangular(L, U, upper=False)
    return precision.sym(torch.linalg.solve_triangular(L.mT, half, upper=True, left=False))


def nearest_spd(X: Tensor) -> Tensor:
    """Nearest symmetric matrix in Frobenius norm whose eigenvalues are at least a small multiple of the largest.

    The multiple is 1e-6 in float32 and 1e-12 in float64. ValueError if no eigenvalue is positive.
    """
    dtype = precision.compute_dtype(X.dtype)
    if not autograd.has_data(X):
        return torch.empty_like(X)
    precision.check_finite(X)
    eigenvalues, V = torch.linalg.eigh(precision.sym(X.double()))
    largest = eigenvalues[..., -1:]
    if not (largest > 0).all():
        raise ValueError(
            "expected a matrix with a positive eigenvalue, to project it to a positive definite one; it has none"
        )
    eigenvalues = torch.maximum(eigenvalues, largest * (1e-6 if dtype == torch.float32 else 1e-12))
    return precision.sym((V * eigenvalues[..., None, :]) @ V.mT).to(X.dtype)
