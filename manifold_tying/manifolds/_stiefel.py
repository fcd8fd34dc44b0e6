"""The Stiefel manifold of tall matrices with orthonormal columns."""

from typing import Literal

import torch
from torch import Tensor

from manifold_tying import autograd, distributed, linalg, precision
from manifold_tying.manifolds._matrices import Matrices

Retraction = Literal["polar", "qr", "cayley", "cayley-neumann"]


class Stiefel(Matrices):
    """St(n, p) = {X (..., n, p) : XᵀX = I}, n >= p, with the Euclidean metric <U, V> = tr UᵀV.

    A :class:`geoopt.Manifold`: works in ``geoopt.ManifoldParameter``, geoopt's optimizers and ours. No n x n matrix is ever
    formed. Tangent vectors are the U with XᵀU skew. A retraction moves X along U and returns a point that is orthonormal to
    rounding, even if X was slightly off the manifold or U is long:

    - "polar": (X + U)(I + UᵀU)^(-1/2), the nearest point to X + U, of second order: O(‖U‖³) from the geodesic (PIT,
      equation 18);
    - "qr": the Q factor of X + U; first order;
    - "cayley": (I - W/2)⁻¹(I + W/2) X with W = PUXᵀ - XUᵀP, P = I - XXᵀ/2, through a p x p inverse; first
      order, second for the canonical metric (Wen and Yin 2013);
    - "cayley-neumann": like "cayley", with ``terms`` terms of a Neumann series in place of the inverse (POET, section 3),
      then projected; for ‖U‖ < 2.

    Points and vectors may be DTensors sharded by rows, as FSDP2 makes them. Projection, transport, checks and the polar
    retraction then take one all-reduce of p x p each and return DTensors. The other retractions raise ValueError.

    Args:
        retraction: "polar", "qr", "cayley" or "cayley-neumann".
        terms: terms of the Neumann series; prefer an even number (see :func:`manifold_tying.linalg.cayley_neumann`).
    """

    name = "Stiefel"

    def __init__(self, retraction: Retraction = "polar", *, terms: int = 2) -> None:
        """See the class for the arguments."""
        precision.check_choice("retraction", retraction, Retraction)
        precision.check_int("terms", terms, 1)
        super().__init__()
        self.retraction = retraction
        self.terms = terms

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Orthogonal projection to the tangent space: U - X sym(XᵀU)."""
        return distributed.row_local_map(tangent_part, x, u)

    egrad2rgrad = proju

    def projx(self, x: Tensor) -> Tensor:
        """The nearest point of the manifold, the polar factor."""
        if not autograd.has_data(x):
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        if not distributed.is_dtensor(x):
            return linalg.polar(x)[0]
        return distributed.row_local_map(lambda reduce, rows: linalg.orthonormalize_rows_(rows.clone(), reduce), x)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Move x along the tangent vector u by this manifold's retraction."""
        with precision.full_precision(x.device):
            if self.retraction == "polar":
                return distributed.row_local_map(lambda reduce, x, u: linalg.reorthonormalize(x + u, reduce), x, u)
            self.check_placement(x)
            if self.retraction == "qr":
                return linalg.orthonormalize(x + u, "qr")
            # The curve converges as u grows: clip at 1e4, beyond which the products would overflow float32.
            u = u * (1e4 / u.abs().amax((-2, -1), keepdim=True).clamp_min(1e4))  # differentiable at 0
            wide = precision.compute_dtype(x.dtype)
            moved = linalg.cayley_curve(x.to(wide), u.to(wide), None if self.retraction == "cayley" else self.terms)
            # An odd number of terms can shrink directions (three terms: to almost 0 near ‖U‖ = 2), an even one cannot.
            shrinks = self.retraction == "cayley-neumann" and self.terms % 2 == 1
            return (linalg.polar(moved)[0] if shrinks else linalg.reorthonormalize(moved)).to(x.dtype)

    def check_placement(self, x: Tensor, label: str = "point") -> None:
        """ValueError if x is a DTensor with a placement that this retraction does not support."""
        if distributed.is_dtensor(x):
            distributed.check_row_sharding(x, label)
            if self.retraction != "polar":
                raise ValueError(
                    f"the {label} is a DTensor, which only retraction 'polar' supports, got {self.retraction!r}; "
                    "choose 'polar'"
                )

    def move(self, x: Tensor, v: Tensor) -> Tensor:
        """``retr(x, proju(x, v))`` for any ambient v."""
        return self.retr(x, self.proju(x, v))

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Geodesic of the Euclidean metric: [X U] exp([[A, -UᵀU], [I, A]]) [I; 0] exp(-A), A = XᵀU (Edelman et al. 1998)."""
        x, u = torch.broadcast_tensors(x, u)
        with precision.full_precision(x.device):
            A = x.mT @ u
            eye = precision.eye_like(A).expand_as(A)
            block = torch.cat([torch.cat([A, -precision.gram(u)], -1), torch.cat([eye, A], -1)], -2)
            first = torch.linalg.matrix_exp(block)[..., : A.shape[-1]]
            return linalg.reorthonormalize(torch.cat([x, u], -1) @ (first @ torch.linalg.matrix_exp(-A)))

    def random_(self, x: Tensor) -> Tensor:
        """Fill x (n, p) with a uniform random point; with the same seed, ranks get the rows that one process would draw."""
        with torch.no_grad():
            return x.copy_(self.projx(distributed.sharded_normal_(x)))

    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        ok, reason = super()._check_shape(shape, name)
        if ok and shape[-1] > shape[-2]:
            return False, f"`{name}` must be tall, shape[-2] >= shape[-1], got {tuple(shape)}"
        return ok, reason

    def _check_point_on_manifold(self, x: Tensor, *, atol: float, rtol: float) -> tuple[bool, str | None]:
        with precision.full_precision(x.device):
            G = distributed.row_reduce(x)(precision.gram(distributed.to_local(x)))
        if G.numel() == 0:  # no matrices on this rank
            return True, None
        error = (G - precision.eye_like(G)).abs().max().item()
        return (True, None) if error <= atol else (False, f"max |XᵀX - I| is {error:.1e}, allowed is {atol:.1e}")

    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float, rtol: float) -> tuple[bool, str | None]:
        with precision.full_precision(x.device):
            XtU = distributed.row_reduce(x)(distributed.to_local(x).mT @ distributed.to_local(u))
        if XtU.numel() == 0:
            return True, None
        error = 2 * precision.sym(XtU).abs().max().item()
        return (True, None) if error <= atol else (False, f"max |XᵀU + UᵀX| is {error:.1e}, allowed is {atol:.1e}")

    def extra_repr(self) -> str:
        return self.retraction


def tangent_part(reduce: distributed.Reduce, x: Tensor, u: Tensor) -> Tensor:
    """U - X sym(XᵀU) for this rank's rows of X and U."""
    with precision.full_precision(x.device):
        return u - x @ precision.sym(reduce(x.mT @ u))


def scaled_tangent_part(reduce: distributed.Reduce, x: Tensor, u: Tensor, scale: Tensor) -> Tensor:
    """Project W = U diag(s) to the tangent space, where a change of column j costs 1/s_j; for this rank's rows.

    W - X C with C_ij = (A + Aᵀ)_ij s_j² / (s_i² + s_j²) and A = XᵀW. The usual projection splits the correction equally
    between two columns, so a column with s_j = 0 would move as much as one with a large s_j.
    """
    with precision.full_precision(x.device):
        w = u * scale
        A = reduce(x.mT @ w)
        squares = scale.square()
        share = squares / (squares[:, None] + squares).clamp_min(torch.finfo(scale.dtype).tiny)
        return w - x @ ((A + A.mT) * share)
