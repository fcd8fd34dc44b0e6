"""What the manifolds of matrices have in common."""

import torch
from torch import Tensor

from manifold_tying import distributed
from manifold_tying._geoopt import Size, geoopt


class Matrices(geoopt.Manifold):
    """Points (..., n, p), with the Euclidean metric <U, V> = tr UᵀV and transport by projection unless overridden."""

    ndim = 2
    reversible = False

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Vector transport by projection to the tangent space at y."""
        moved: Tensor = self.proju(y, v)
        return moved

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """tr UᵀV, shape (...)."""
        product = distributed.to_local(u) * distributed.to_local(u if v is None else v)
        return distributed.row_reduce(x)(product.sum((-2, -1), keepdim=keepdim))

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """‖U‖_F, shape (...); its gradient at 0 is 0."""
        if distributed.is_dtensor(x):
            return self.inner(x, u, keepdim=keepdim).sqrt()
        norm: Tensor = torch.linalg.vector_norm(u, dim=(-2, -1), keepdim=keepdim)
        return norm

    def random(
        self, *size: Size, dtype: torch.dtype | None = None, device: torch.types.Device = None, **_: object
    ) -> geoopt.ManifoldTensor:
        """A random point: uniform (Haar) on Stiefel and spheres, exp of a symmetric Gaussian matrix on SPD."""
        shape = geoopt.utils.size2shape(*size)
        self._assert_check_shape(shape, "x")
        return geoopt.ManifoldTensor(self._from_normal(torch.randn(shape, dtype=dtype, device=device)), manifold=self)

    def origin(
        self, *size: Size, dtype: torch.dtype | None = None, device: torch.types.Device = None, seed: int | None = 42
    ) -> geoopt.ManifoldTensor:
        """The first columns of the identity, on spheres the first axes; ``seed`` is geoopt's and has no effect."""
        shape = geoopt.utils.size2shape(*size)
        self._assert_check_shape(shape, "x")
        return geoopt.ManifoldTensor(self._from_zeros(torch.zeros(shape, dtype=dtype, device=device)), manifold=self)

    def _from_normal(self, x: Tensor) -> Tensor:
        nearest: Tensor = self.projx(x)
        return nearest

    def _from_zeros(self, x: Tensor) -> Tensor:
        x.diagonal(dim1=-2, dim2=-1).fill_(1)
        return x
