"""Spheres: matrices whose rows or columns have given norms, or which have one as a whole."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from manifold_tying import autograd, distributed
from manifold_tying.manifolds._matrices import Matrices

Of = Literal["rows", "columns", "matrix"]
_DIMS: dict[str, tuple[int, ...]] = {"rows": (-1,), "columns": (-2,), "matrix": (-2, -1)}


def norms(x: Tensor, of: Of, reduce: distributed.Reduce = distributed.no_reduce) -> Tensor:
    """Norms of the rows (..., n, 1), the columns (..., 1, p) or the matrices (..., 1, 1), in float64: squares may overflow."""
    lengths = torch.linalg.vector_norm(x, dim=_DIMS[of], keepdim=True, dtype=torch.float64)
    return lengths if reduce is distributed.no_reduce else reduce(lengths.square()).sqrt()  # no root: its gradient at 0


@dataclass(frozen=True)
class Spheres:
    """The arithmetic, on this rank's rows of one matrix or of several."""

    of: Of
    radius: Tensor
    """In the shape of :func:`norms`."""
    reduce: distributed.Reduce

    @classmethod
    def stack(cls, spheres: Sequence["Sphere"], points: Sequence[Tensor]) -> "Spheres":
        """For the stacked parts of points of one shape and placement."""
        parts = [sphere.local(x) for sphere, x in zip(spheres, points, strict=True)]
        return cls(parts[0].of, torch.stack([part.radius for part in parts]), parts[0].reduce)

    def dot(self, u: Tensor, v: Tensor) -> Tensor:
        """<u, v> of each vector, in the shape of :func:`norms`."""
        return self.reduce((u * v).sum(_DIMS[self.of], keepdim=True))

    def dot_of_blocks(self, us: Sequence[Tensor], vs: Sequence[Tensor], scratch: Tensor) -> Tensor:
        """:meth:`dot` of matrices given as blocks of rows; overwrites ``scratch``."""
        if self.radius.numel() == 1 and scratch.is_cpu:  # one vector: BLAS reads it and writes nothing
            dots = [torch.dot(u.flatten(), v.flatten()).view(self.radius.shape) for u, v in zip(us, vs, strict=True)]
        else:
            products = (torch.mul(u, v, out=scratch[..., : u.shape[-2], :]) for u, v in zip(us, vs, strict=True))
            dots = [product.sum(_DIMS[self.of], keepdim=True) for product in products]
        return self.reduce(functools.reduce(torch.add, dots))

    def projx(self, x: Tensor) -> Tensor:
        return x * (self.radius / norms(x, self.of, self.reduce)).to(x.dtype)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u - x * (self.dot(x, u) / self.radius.square())

    egrad2rgrad = proju

    def scaled_tangent(self, x: Tensor, u: Tensor) -> Tensor:
        """The tangent part of u with the norm of the radius for each vector; 0 stays 0."""
        u = self.proju(x, u)
        lengths = norms(u, self.of, self.reduce)
        return u * torch.where(lengths > 0, self.radius / lengths, 0).to(u.dtype)

    def normalize_(self, x: Tensor, squares: Tensor, skip: Tensor | None) -> None:
        """projx in place, given ``squares`` = <x, x>; leaves zeros alone, and x if ``skip`` is 1."""
        factor = self.radius / squares.sqrt().clamp_min(torch.finfo(x.dtype).tiny)
        x.mul_(factor if skip is None else torch.where(skip > 0, 1, factor))

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        angle = norms(u, self.of, self.reduce) / self.radius
        return x * angle.cos().to(x.dtype) + u * torch.sinc(angle / torch.pi).to(x.dtype)

    def angle_and_sine(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sine = norms(self.proju(x, y), self.of, self.reduce) / self.radius
        return torch.atan2(sine, self.dot(x, y) / self.radius.square()), sine

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        angle, sine = self.angle_and_sine(x, y)
        moved = sine > 0
        return self.proju(x, y) * torch.where(moved, angle / torch.where(moved, sine, 1), 1).to(x.dtype)


class Sphere(Matrices):
    """{X (..., n, p) : each row of X has the norm ``radius``}, or each column, or X itself, with the Euclidean metric tr UᵀV.

    A :class:`geoopt.Manifold`, also for stacks of matrices. The retraction normalizes X + U and is of second order. Geodesics
    are great circles: ``expmap``, ``logmap`` and ``dist`` are exact.

    Points and vectors may be DTensors sharded by rows. With ``of="rows"`` their projection, retraction and transport take no
    all-reduce, otherwise one each.

    Args:
        of: what has the norm: "rows", "columns" (vectors along the second-to-last dimension) or the "matrix" (Frobenius).
        radius: the norm, or a tensor of norms, which becomes a buffer. It broadcasts to (..., n, 1) for rows, (..., 1, p) for
            columns and (..., 1, 1) for matrices.
    """

    name = "Sphere"
    radius: float | Tensor

    def __init__(self, of: Of = "rows", radius: float | Tensor = 1.0) -> None:
        """See the class for the arguments."""
        if of not in _DIMS:
            raise ValueError(f"unknown of={of!r}; choose one of {', '.join(_DIMS)}")
        super().__init__()
        self.of = of
        is_number = isinstance(radius, (int, float)) and not isinstance(radius, bool)
        values = torch.tensor(float(radius), dtype=torch.float64) if is_number else radius
        fits = isinstance(values, Tensor) and values.is_floating_point()
        if isinstance(values, Tensor) and fits and autograd.has_data(values):
            fits = bool(((values >= 1e-15) & (values <= 1e15)).all())
        if not fits:
            raise ValueError(f"expected radius to be a float from 1e-15 to 1e15 or a tensor of them, got {radius!r}")
        if isinstance(radius, Tensor):
            self.register_buffer("radius", radius.detach().clone())
        else:
            self.radius = float(radius)

    def local(self, x: Tensor) -> Spheres:
        """The arithmetic for this rank's rows of x."""
        part, given = distributed.to_local(x), self.radius
        radius = given.to(part.device, part.dtype) if isinstance(given, Tensor) else part.new_full((), given)
        radius = radius.expand(self._norms_shape(x.shape))
        reduce = distributed.no_reduce if self.of == "rows" else distributed.row_reduce(x)
        if reduce is distributed.no_reduce:  # else all ranks share the columns or the matrix
            radius = distributed.shard_like(radius, x)
        return Spheres(self.of, radius, reduce)

    def projx(self, x: Tensor) -> Tensor:
        """The nearest point: each vector is scaled to its norm. Zeros have none and give NaN."""
        return self._map(self.local(x).projx, x)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Orthogonal projection to the tangent space: u - x <x, u> / radius², for each vector."""
        return self._map(self.local(x).proju, x, u)

    egrad2rgrad = proju

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """The nearest point to x + u."""
        return self.projx(x + u)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """The great circle x cos t + u sin(t) / t with t = ‖u‖ / radius."""
        return self._map(self.local(x).expmap, x, u)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """The inverse of :meth:`expmap`, for vectors that are not antipodes."""
        return self._map(self.local(x).logmap, x, y)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Geodesic distance, the root of the sum of squared arc lengths, shape (...)."""
        part = self.local(x)
        arcs = part.radius * part.angle_and_sine(x, y)[0].to(x.dtype)
        distance: Tensor = torch.linalg.vector_norm(arcs, dim=(-2, -1), keepdim=keepdim)
        return distance

    def component_inner(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        """The inner product of each row, column or matrix, in the shape of their norms."""
        part, v = self.local(x), u if v is None else v
        if part.reduce is distributed.no_reduce:
            return (u * v).sum(_DIMS[self.of], keepdim=True)  # of DTensors a DTensor
        return part.dot(distributed.to_local(u), distributed.to_local(v))

    def _from_zeros(self, x: Tensor) -> Tensor:
        """Each vector along its first axis."""
        x[(..., *(0 if dim in _DIMS[self.of] else slice(None) for dim in (-2, -1)))] = 1
        return self.projx(x)

    def _map(self, f: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
        return distributed.row_local_map(lambda _, *parts: f(*parts), x, *others)

    def _norms_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], *(1 if dim in _DIMS[self.of] else shape[dim] for dim in (-2, -1)))

    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        ok, reason = super()._check_shape(shape, name)
        if not ok:
            return ok, reason
        if torch.Size(shape[dim] for dim in _DIMS[self.of]).numel() == 1:
            return False, f"`{name}` has {self.of} of one entry, which cannot move, in {tuple(shape)}"
        given, wanted = getattr(self.radius, "shape", ()), self._norms_shape(shape)
        fits = len(given) <= len(wanted) and all(a in (1, b) for a, b in zip(given[::-1], wanted[::-1], strict=False))
        reason = f"`{name}` of shape {tuple(shape)} has norms of shape {wanted}, but radius {tuple(given)}"
        return fits, None if fits else reason

    def _check_point_on_manifold(self, x: Tensor, *, atol: float, rtol: float) -> tuple[bool, str | None]:
        part = self.local(x)
        lengths = norms(distributed.to_local(x), self.of, part.reduce)
        off = ~((lengths - part.radius).abs() <= atol + rtol * part.radius)  # also NaN
        count = distributed.row_reduce(x)(off.sum())  # all ranks agree
        return (True, None) if not count else (False, f"norms of {self.of} are not the radius, allowed is {atol:.1e}")

    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, *, atol: float, rtol: float) -> tuple[bool, str | None]:
        products = self.local(x).dot(distributed.to_local(x), distributed.to_local(u))
        count = distributed.row_reduce(x)((~(products.abs() <= atol)).sum())
        return (True, None) if not count else (False, f"<x, u> is not 0 for all {self.of}, allowed is {atol:.1e}")

    def extra_repr(self) -> str:
        return f"of={self.of!r}, radius={'tensor' if isinstance(self.radius, Tensor) else self.radius}"
