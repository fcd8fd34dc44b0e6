"""PIT with the memory on the Stiefel manifold and the transform as a Cholesky factor."""

import math
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import autograd, distributed, kernels, precision
from manifold_tying.manifolds import Retraction, Stiefel
from manifold_tying.parametrizations import CholeskyFactor, Diagonal, parametrized, register, stiefel, warn_if_off
from manifold_tying.tying._pit import PIT, Memory, check_hidden


class ManifoldPIT(PIT):
    """PIT that stores Z on St(V, d) and L with T = L Lᵀ. ``PIT(memory="frozen" | "trainable")`` returns this class.

    The initial memory is a random orthonormal matrix, the initial T is I.

    Args:
        vocab_size: V >= d.
        hidden_size: d.
        memory: "frozen" (the paper's default) or "trainable", by a Riemannian optimizer.
        retraction: how that optimizer moves Z, see :class:`manifold_tying.Stiefel`.
        diagonal: "softplus" or "exp", the map that keeps L's diagonal positive.

    Raises:
        ValueError: vocab_size < hidden_size, unknown retraction or diagonal.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        memory: Memory = "frozen",
        retraction: Retraction = "polar",
        diagonal: Diagonal = "softplus",
    ) -> None:
        super().__init__(vocab_size, hidden_size)
        dtype = precision.compute_dtype(torch.get_default_dtype())
        start = torch.randn(vocab_size, hidden_size, dtype=dtype)
        self.register_parameter("memory", nn.Parameter(start, requires_grad=memory == "trainable"))
        stiefel(self, "memory", retraction=retraction)
        self.register_parameter("cholesky_factor", nn.Parameter(torch.eye(hidden_size, dtype=dtype)))
        register(self, "cholesky_factor", CholeskyFactor(diagonal, dtype))

    @classmethod
    def _from_factors(cls, Z: Tensor, T: Tensor, dtype: torch.dtype, **options: Any) -> PIT:
        L = torch.linalg.cholesky(T).contiguous()
        with torch.device("meta"):  # avoids drawing and projecting a random memory
            pit = cls(*Z.shape, **options)
        pit = pit.to(dtype).to_empty(device=Z.device)
        with torch.no_grad():
            # Already orthonormal; assigning pit.memory would project again.
            parametrized(pit)["memory"].original.copy_(Z)
        pit.cholesky_factor = L.to(dtype)
        return pit

    @property
    def head_weight(self) -> Tensor:
        Z = self.memory
        with precision.full_precision(Z.device):
            return Z @ self.transform

    def _table(self) -> Tensor:
        return self.memory

    def _divide(self, rows: Tensor, split: bool) -> Tensor:
        """rows T⁻¹, by two triangular solves, or by a product with T⁻¹ in parts."""
        return _split_map(rows, self.cholesky_factor, True) if split else _divide(rows, self.cholesky_factor)

    def _factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """h T and Z.

        h T is larger than the logits by about √(V/d), so it can overflow float16 when the logits do not. For float16 matmuls
        a power of two close to that factor moves from h T to Z.
        """
        if precision.autocast_dtype(hidden) != torch.float16:
            return self._readout(hidden), self.memory
        factor = 2.0 ** round(math.log2(self.vocab_size / self.hidden_size) / 2)
        return self._readout(hidden, factor), self.memory * factor

    def _readout(self, hidden: Tensor, divisor: float = 1.0) -> Tensor:
        """h T / divisor, computed in float32, in the dtype of h."""
        check_hidden(hidden, self.hidden_size)
        split = kernels.splits(hidden, precision.autocast_dtype(hidden))
        with precision.full_precision(hidden.device):
            L = self.cholesky_factor if divisor == 1.0 else self.cholesky_factor / divisor**0.5
            h = hidden.reshape(-1, hidden.shape[-1])
            if split:
                return _split_map(h, L, False).view_as(hidden)
            few = not autograd.is_exporting() and len(h) < len(L)  # an export serves any number of tokens
            h = (h.to(L.dtype) @ L) @ L.mT if few else h.to(L.dtype) @ (L @ L.mT)  # whichever is cheaper
            return h.reshape(hidden.shape).to(hidden.dtype)

    def materialize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        warn_if_off(self)
        with torch.no_grad():
            memory = distributed.full_tensor(self.memory)
            Z, L = memory.double(), self.cholesky_factor.double()
            E, W_out = (M.to(dtype or memory.dtype).contiguous() for M in (_divide(Z, L), L @ (L.mT @ Z.mT)))
            return E, W_out

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if not parametrize.is_parametrized(self):
            raise RuntimeError("materialize removed the constraints of this interface; create a new one")
        stored = parametrized(self)
        Z, L = stored["memory"].original, stored["cholesky_factor"].original
        cast(Stiefel, stored["memory"][0].manifold).random_(Z)
        eye = torch.eye(self.hidden_size, dtype=L.dtype, device=L.device)
        start = cast(CholeskyFactor, stored["cholesky_factor"][0]).right_inverse(eye)
        distributed.to_local(L).copy_(distributed.shard_like(start, L))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.memory.dtype
        super()._apply(fn, recurse)
        widened = before == torch.float32 and self.memory.dtype == torch.float64 and not self.memory.is_meta
        if widened and parametrize.is_parametrized(self, "memory"):
            self.memory = self.memory.detach()  # project again: it is only orthonormal to float32 rounding
        return self

    def extra_repr(self) -> str:
        # materialize(pit) shortens the parameter's name
        stored = next(p for name, p in self.named_parameters() if "memory" in name)
        kind = "trainable" if stored.requires_grad else "frozen"
        return f"{super().extra_repr()}, memory={kind!r}"


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, L: Tensor) -> Tensor:
        quotient = _solve(rows, L)
        ctx.save_for_backward(quotient, L)
        return quotient

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        # E = Z T⁻¹: dE = dZ T⁻¹ - E dT T⁻¹, so T's gradient is -EᵀḠ T⁻¹. With a frozen Z only EᵀḠ has n rows.
        quotient, L = ctx.saved_tensors
        grad_rows, grad_L = _solve(grad, L) if ctx.needs_input_grad[0] else None, None
        if ctx.needs_input_grad[1]:
            product = quotient.mT @ grad_rows if grad_rows is not None else _solve(quotient.mT @ grad, L)
            grad_L = -(product + product.mT) @ L  # through T = L Lᵀ
        return grad_rows, grad_L


class _SplitMap(torch.autograd.Function):
    """rows T⁻¹, or rows T, in the dtype of rows, by products of bfloat16 matrices."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, L: Tensor, divide: bool) -> Tensor:
        half = torch.linalg.solve_triangular(L, precision.eye_like(L), upper=False).mT if divide else L
        M = kernels.split_product(half, half.mT)
        result = kernels.split_product(rows, M).to(rows.dtype)
        autograd.save(ctx, (rows, L, divide), result, M)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (rows, L, divide), (result, M) = autograd.saved(ctx)
        times, grad_L = kernels.split_product, None
        grad = grad.bfloat16() if divide else grad  # one part, as autocast rounds it in every layer
        grad_rows = times(grad, M).to(rows.dtype) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            grad_T = times(times(result.mT, grad), M).neg_() if divide else times(rows.mT, grad)
            grad_L = times(grad_T + grad_T.mT, L)
        return grad_rows, grad_L, None


def _map(rows: Tensor, L: Tensor, divide: bool) -> Tensor:
    return _solve(rows, L) if divide else (rows.to(L.dtype) @ (L @ L.mT)).to(rows.dtype)


def _solve(rows: Tensor, L: Tensor) -> Tensor:
    # (T⁻¹ rowsᵀ)ᵀ gives a row-major result. Compiled for a CPU, torch up to 2.13 silently miscomputes the norm of a
    # column-major one and its gradient (pytorch/pytorch#185702).
    solve: Callable[..., Tensor] = torch.linalg.solve_triangular
    return solve(L.mT, solve(L, rows.mT, upper=False), upper=True).mT


_divide = autograd.custom_gradient(_Divide, _solve, differentiable=True)
_split_map = autograd.custom_gradient(_SplitMap, _map)
