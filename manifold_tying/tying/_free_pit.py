"""PIT as one free table W and its pseudo-inverse."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying import autograd, distributed, linalg, precision
from manifold_tying.tying._pit import PIT, Memory, check_hidden
from manifold_tying.tying._vocabulary import VocabularyShard
from manifold_tying.tying.interface import tied_std

# Required ratio of the smallest to the largest diagonal entry of the Cholesky factor of WᵀW, an upper bound on 1 / cond(W).
MIN_PIVOT_RATIO = 1e-6


class FreePIT(PIT):
    """PIT that stores one table W (V, d): W_out = Wᵀ and E = W (WᵀW)⁻¹. ``PIT(memory="free")`` returns this class.

    Every W of full column rank has unique polar factors W = Z T with ZᵀZ = I and T symmetric positive definite. So
    W_out = T Zᵀ and E = Z T⁻¹: any optimizer that trains W trains Z and T, and W_out E = I holds algebraically.
    ``memory``, ``transform`` and ``cholesky_factor`` compute Z, T and L from W on access.

    WᵀW, its inverse and the rows of E are computed in float64 and rounded once, so ‖W_out E - I‖_F / √d is at most
    6e-8 cond(W) in float32. (WᵀW)⁻¹ is cached until W changes, except on a GPU while gradients are needed: checking whether W
    has changed would sync.

    Args:
        vocab_size: V >= d.
        hidden_size: d.
        memory: "free".
        std: standard deviation of the initial W; None is :func:`tied_std`.

    Raises:
        ValueError: vocab_size < hidden_size, or std is not positive and finite; also raised by ``embed`` and the attributes
            if W is rank-deficient.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, memory: Memory = "free", std: float | None = None) -> None:
        super().__init__(vocab_size, hidden_size)
        self.std = tied_std(hidden_size) if std is None else std
        if not 0 < self.std < math.inf:
            raise ValueError(f"expected a positive, finite std, got {std}")
        dtype = precision.compute_dtype(torch.get_default_dtype())
        self.table = nn.Parameter(torch.randn(vocab_size, hidden_size, dtype=dtype) * self.std)
        self._cached: tuple[Any, Tensor] | None = None  # fingerprint of W and (WᵀW)⁻¹

    @classmethod
    def _from_factors(cls, Z: Tensor, T: Tensor, dtype: torch.dtype, **options: Any) -> PIT:
        with torch.device("meta"):
            pit = cls(*Z.shape, **options)
        pit = pit.to_empty(device=Z.device)
        pit.table = nn.Parameter((Z @ T).to(dtype).contiguous())
        return pit

    @property
    def memory(self) -> Tensor:  # type: ignore[override]  # read-only
        """Z, (V, d): the orthonormal polar factor of W."""
        return linalg.polar(distributed.full_tensor(self.table))[0]

    @property
    def transform(self) -> Tensor:
        """T, (d, d): the symmetric polar factor of W."""
        return linalg.polar(distributed.full_tensor(self.table))[1]

    @property
    def cholesky_factor(self) -> Tensor:  # type: ignore[override]
        """L, (d, d), with T = L Lᵀ."""
        return torch.linalg.cholesky(self.transform)

    @property
    def head_weight(self) -> Tensor:
        if self.bridge is None:
            return self.table
        with precision.full_precision(self.table.device):
            return self.table @ self.bridge.mT

    def _table(self) -> Tensor:
        return self.table

    def _divide(self, rows: Tensor) -> Tensor:
        """rows (WᵀW)⁻¹."""
        inverse = None if autograd.in_transform() else self._inverse_gram()
        return _divide(rows, distributed.to_local(self.table), inverse, VocabularyShard.of(self.table))

    def _factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        check_hidden(hidden, self.hidden_size)
        if self.bridge is not None:
            with precision.full_precision(hidden.device):
                hidden = (hidden.to(self.bridge.dtype) @ self.bridge).to(hidden.dtype)
        return hidden, self.table

    def materialize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            W = distributed.full_tensor(self.table)
            wide = W.to(torch.float64, copy=True)
            return self._with_bridge(wide @ _inverse_gram(W), wide.mT, dtype or W.dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        distributed.sharded_normal_(self.table).mul_(self.std)

    def _inverse_gram(self) -> Tensor:
        """(WᵀW)⁻¹ in float64, recomputed only when W has changed."""
        W = self.table.detach()
        may_ask = W.device.type == "cpu" or not torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not autograd.has_data(distributed.to_local(W)) or not may_ask:
            return _inverse_gram(W)
        key = (_fingerprint(W), W.dtype, W.device)
        if self._cached is None or self._cached[0] != key:
            with torch.inference_mode(False):  # training may use it next
                self._cached = key, _inverse_gram(W)
        return self._cached[1]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, memory='free'" + (", bridge=True" if self.bridge is not None else "")


@torch.no_grad()
def _fingerprint(W: Tensor) -> float:
    """vᵀWᵀWv for a fixed v, by one matrix-vector product: it changes when WᵀW does.

    Version counters would be cheaper, but writes through ``.data`` bypass them: EMA weights, some optimizers, fused kernels
    of other libraries.
    """
    rows = distributed.to_local(W)
    v = torch.arange(1, rows.shape[1] + 1, dtype=W.dtype, device=W.device).sin()
    v = v + v.sign()  # from 1 to 2 in size: no column counts for less than the rounding
    s = (rows @ v).double()
    return float(distributed.row_reduce(W)(s @ s))


@torch.no_grad()
def _inverse_gram(W: Tensor) -> Tensor:
    """(WᵀW)⁻¹ (d, d) in float64, one all-reduce for a DTensor; ValueError if W is rank-deficient.

    NaN if W is not finite; on a GPU, where the check would sync, also if W is rank-deficient.
    """
    G = distributed.row_reduce(W)(precision.gram_in_double(distributed.to_local(W)))
    L, info = torch.linalg.cholesky_ex(G)
    if G.device.type == "cpu" and autograd.has_data(G) and not torch.compiler.is_compiling():
        pivots = L.diagonal()
        if torch.isfinite(G).all() and (info != 0 or pivots.min() < MIN_PIVOT_RATIO * pivots.max()):
            raise ValueError(
                f"expected a table W of full column rank, but WᵀW (d = {len(G)}) is singular to working accuracy: E = "
                "W (WᵀW)⁻¹ is not determined. Look for constant, duplicate or zero columns, or train with a lower rate"
            )
    return torch.cholesky_inverse(L).where(info == 0, torch.nan)


class _Divide(torch.autograd.Function):
    """rows G⁻¹ with G = WᵀW. With e = rows G⁻¹ and Y = ē G⁻¹ the gradients are Y for rows and -W (eᵀY + Yᵀe) for W."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, W: Tensor, inverse: Tensor, vocabulary: VocabularyShard) -> Tensor:
        e = (rows.to(inverse.dtype) @ inverse).to(rows.dtype)
        autograd.save(ctx, (rows, W, inverse, vocabulary), e)
        return e

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (_, W, inverse, _), (e,) = autograd.saved(ctx)
        Y = (grad.to(inverse.dtype) @ inverse).to(grad.dtype)
        grad_W = None
        if ctx.needs_input_grad[1]:
            S = e.mT @ Y
            grad_W = W @ (S + S.mT).neg_()
        return Y, grad_W, None, None


def _plain(rows: Tensor, W: Tensor, inverse: Tensor | None, vocabulary: VocabularyShard) -> Tensor:
    wide = W.double()
    L = torch.linalg.cholesky(vocabulary.reduce_from_ranks(wide.mT @ wide))
    return torch.cholesky_solve(rows.double().mT, L).mT.to(rows.dtype)


_divide = autograd.custom_gradient(_Divide, _plain)
