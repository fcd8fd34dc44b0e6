"""Rows of the pseudo-inverse E = W (WᵀW)⁻¹ of a table W (V, d), so that Wᵀ E = I."""

from typing import Any

import torch
from torch import Tensor

from manifold_tying import autograd, distributed, kernels, precision
from manifold_tying.tying._vocabulary import VocabularyShard

# Required ratio of the smallest to the largest diagonal entry of the Cholesky factor of WᵀW, an upper bound on 1 / cond(W).
MIN_PIVOT_RATIO = 1e-6


class InverseGram:
    """W to :func:`inverse_gram`, recomputed only when W has changed.

    On a GPU it is recomputed on every call while gradients are needed: checking whether W has changed would sync.
    """

    def __init__(self) -> None:
        self._cached: tuple[Any, Tensor] | None = None  # fingerprint of W, how it was computed, and (WᵀW)⁻¹

    def __call__(self, table: Tensor, split: bool) -> Tensor:
        W = table.detach()
        may_ask = W.device.type == "cpu" or not torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not autograd.has_data(distributed.to_local(W)) or not may_ask:
            return inverse_gram(W, split)
        key, cached = (_fingerprint(W), W.dtype, W.device, split), self._cached
        if cached is None or cached[0] != key:
            with torch.inference_mode(False):  # training may use it next
                self._cached = cached = key, inverse_gram(W, split)
        return cached[1]  # not the attribute: threads may share it


def divide(rows: Tensor, table: Tensor, inverse: InverseGram, split: bool) -> Tensor:
    """rows (WᵀW)⁻¹ of rows (n, d) of the table, in float32 or wider, if ``split`` by split products; differentiable in both."""
    wide = rows.to(precision.compute_dtype(rows.dtype))
    known = None if autograd.in_transform() else inverse(table, split)
    return _divide(wide, distributed.to_local(table), known, VocabularyShard.of(table), split)


@torch.no_grad()
def _fingerprint(W: Tensor) -> float:
    """vᵀWᵀWv for a fixed v, by one matrix-vector product: it changes when WᵀW does.

    Version counters would be cheaper, but writes through ``.data`` bypass them: EMA weights, some optimizers, fused kernels
    of other libraries.
    """
    rows, wide = distributed.to_local(W), precision.compute_dtype(W.dtype)
    v = torch.arange(1, rows.shape[1] + 1, dtype=wide, device=W.device).sin()
    v = v + v.sign()  # from 1 to 2 in size: no column counts for less than the rounding
    parts = [slice(None)] if rows.dtype == wide else precision.row_chunks(rows)
    s = torch.cat([rows[part].to(wide) @ v for part in parts]).double()
    return float(distributed.row_reduce(W)(s @ s))


@torch.no_grad()
def inverse_gram(W: Tensor, split: bool = False) -> Tensor:
    """(WᵀW)⁻¹ (d, d) in float64, one all-reduce for a DTensor; ValueError if W is rank-deficient.

    NaN if W is not finite; on a GPU, where the check would sync, also if W is rank-deficient. With ``split`` in float32.
    """
    G = distributed.row_reduce(W)((kernels.split_gram if split else precision.gram_in_double)(distributed.to_local(W)))
    L, info = torch.linalg.cholesky_ex(G)
    if G.device.type == "cpu" and autograd.has_data(G) and not torch.compiler.is_compiling():
        pivots = L.diagonal()
        if torch.isfinite(G).all() and (info != 0 or pivots.min() < MIN_PIVOT_RATIO * pivots.max()):
            raise ValueError(
                f"expected a table W of full column rank, but WᵀW (d = {len(G)}) is singular to working accuracy: E = "
                "W (WᵀW)⁻¹ is not determined. Look for constant, duplicate or zero columns, or train with a lower rate"
            )
    return torch.cholesky_inverse(L).where(info == 0, torch.nan).to(torch.float32 if split else G.dtype)


class _Divide(torch.autograd.Function):
    """rows G⁻¹ with G = WᵀW. With e = rows G⁻¹ and Y = ē G⁻¹ the gradients are Y for rows and -W (eᵀY + Yᵀe) for W."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, W: Tensor, inverse: Tensor, vocabulary: VocabularyShard, split: bool) -> Tensor:
        # In WᵀE an error of E counts cond(W)² times, hence three parts.
        e = kernels.split_product(rows, inverse, 3) if split else (rows.to(inverse.dtype) @ inverse).to(rows.dtype)
        autograd.save(ctx, (rows, W, inverse, vocabulary, split), e)
        return e

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (_, W, inverse, _, split), (e,) = autograd.saved(ctx)
        times, grad_W = kernels.split_product, None
        grad = grad.bfloat16() if split else grad  # one part, as autocast rounds it in every layer
        Y = times(grad, inverse) if split else (grad.to(inverse.dtype) @ inverse).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            S = times(times(e.mT, grad), inverse) if split else e.mT @ Y
            S = (S + S.mT).neg_()
            if split or W.dtype == S.dtype:  # in parts, since an error of W or S counts cond(W) times
                grad_W = times(W, S).to(W.dtype) if split else W @ S
            else:  # of a 16-bit table in float32, one block of rows at a time
                grad_W = torch.empty_like(W)
                for rows in precision.row_chunks(W):
                    grad_W[rows] = W[rows].to(S.dtype) @ S
        return Y, grad_W, None, None, None


def _plain(rows: Tensor, W: Tensor, inverse: Tensor | None, vocabulary: VocabularyShard, split: bool) -> Tensor:
    wide = W.double()
    L = torch.linalg.cholesky(vocabulary.reduce_from_ranks(wide.mT @ wide))
    return torch.cholesky_solve(rows.double().mT, L).mT.to(rows.dtype)


_divide = autograd.custom_gradient(_Divide, _plain)
