"""PIT as one free table W and its pseudo-inverse."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying import distributed, linalg, precision
from manifold_tying.tying._pit import PIT, Memory, check_hidden
from manifold_tying.tying._pseudo_inverse import InverseGram, divide, inverse_gram
from manifold_tying.tying.interface import tied_std


class FreePIT(PIT):
    """PIT that stores one table W (V, d): W_out = Wᵀ and E = W (WᵀW)⁻¹. ``PIT(memory="free")`` returns this class.

    Every W of full column rank has unique polar factors W = Z T with ZᵀZ = I and T symmetric positive definite. So
    W_out = T Zᵀ and E = Z T⁻¹: any optimizer that trains W trains Z and T, and W_out E = I holds algebraically.
    ``memory``, ``transform`` and ``cholesky_factor`` compute Z, T and L from W on access.

    WᵀW, its inverse and the rows of E are computed in float64 and rounded once, so ‖W_out E - I‖_F / √d is at most
    6e-8 cond(W) in float32. Where 16-bit products follow, a GPU computes WᵀW to about 2^-26 and the rows of E to about 2^-24.
    (WᵀW)⁻¹ is cached until W changes, except on a GPU while gradients are needed: checking that would sync.

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
        self._inverse = InverseGram()

    @classmethod
    def _from_factors(cls, Z: Tensor, T: Tensor, dtype: torch.dtype, **options: Any) -> PIT:
        with torch.device("meta"):
            pit = cls(*Z.shape, **options)
        pit.table = nn.Parameter((Z @ T).to(dtype).contiguous())
        return pit

    @classmethod
    def share(cls, table: Tensor) -> "FreePIT":
        """An interface on an existing table (V, d), which stays the same parameter."""
        with torch.device("meta"):
            pit = cls(*table.shape)
        pit.table = table if isinstance(table, nn.Parameter) else nn.Parameter(table)
        pit.embedding_dtype = table.dtype
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
        L: Tensor = torch.linalg.cholesky(self.transform)
        return L

    @property
    def head_weight(self) -> Tensor:
        return self.table

    def _table(self) -> Tensor:
        return self.table

    def _divide(self, rows: Tensor, split: bool) -> Tensor:
        """rows (WᵀW)⁻¹."""
        return divide(rows, self.table, self._inverse, split)

    def _factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        check_hidden(hidden, self.hidden_size)
        return hidden, self.table

    def materialize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            W = distributed.full_tensor(self.table)
            wide = W.to(torch.float64, copy=True)
            return (wide @ inverse_gram(W)).to(dtype or W.dtype), wide.mT.to(dtype or W.dtype).contiguous()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        distributed.sharded_normal_(self.table).mul_(self.std)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, memory='free'"
