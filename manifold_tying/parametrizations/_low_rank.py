"""Weights of low rank or fixed spectrum: W = U diag(s) Vᵀ with U and V points of Stiefel."""

from collections.abc import Callable
from typing import Literal, Self, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from manifold_tying import autograd, precision
from manifold_tying.manifolds import Stiefel
from manifold_tying.parametrizations._constraint import Constraint
from manifold_tying.parametrizations._layout import Layout
from manifold_tying.parametrizations._register import register

M = TypeVar("M", bound=nn.Module)
Spectrum = Literal["free", "fixed", "equal"]
_OVERSAMPLING, _ITERATIONS = 8, 4
_ROUNDING = 1e-14  # of singular vectors


class LowRank(Constraint):
    """W = U diag(s) Vᵀ: stores U (..., m, r) and V (..., n, r), points of Stiefel, and s, unless the spectrum is fixed."""

    call = "low_rank"
    spectrum: Tensor | None

    def __init__(self, layout: Layout, dtype: torch.dtype, rank: int, kind: Spectrum) -> None:
        super().__init__(dtype)
        self.layout = layout
        self.rank = rank
        self.kind = kind
        self.manifolds = (Stiefel(), Stiefel())
        self.register_buffer("spectrum", None)

    def forward(self, U: Tensor, V: Tensor, s: Tensor | None = None) -> Tensor:  # type: ignore[override]
        left, right = self._factors(U, V, s)
        with precision.disable_autocast(U.device):
            return self.layout.to_weight(left @ right.mT).to(self.weight_dtype(U))

    def linear(self, x: Tensor, stored: list[Tensor], bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias, by two thin products where they take fewer operations than W and one product."""
        (left, right), dtype = self._factors(*stored), self.weight_dtype(stored[0])
        m, n, r = left.shape[-2], right.shape[-2], self.rank
        # Per token, thin products take r(m + n) and the whole weight mn; an exported program has any number of tokens.
        forming = 0 if autograd.is_exporting() else r * m * n
        tokens = 1 if autograd.is_exporting() else x.numel() // x.shape[-1]
        if tokens * r * (m + n) > tokens * m * n + forming:
            return functional.linear(x, self(*stored), bias)
        return functional.linear(functional.linear(x, right.mT.to(dtype)), left.to(dtype), bias)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The factors of the nearest matrix of this rank and spectrum."""
        matrix, r = self.layout.to_matrix(weight), self.rank
        if not autograd.has_data(matrix):
            batch, (m, n) = matrix.shape[:-2], matrix.shape[-2:]
            U, s, V = matrix.new_empty(*batch, m, r), matrix.new_empty(*batch, r), matrix.new_empty(*batch, n, r)
        else:
            precision.check_finite(matrix)
            U, s, V = largest_singular(matrix, r)
        if self.kind == "fixed":
            if self.spectrum is None or self.spectrum.is_meta or self.spectrum.isnan().any():
                self.spectrum = s
            return U, V
        return U, V, s.mean(-1, keepdim=True) if self.kind == "equal" else s

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.spectrum is not None and self.spectrum.is_meta
        super()._apply(fn, recurse)
        if was_meta and self.spectrum is not None and not self.spectrum.is_meta:
            self.spectrum.fill_(torch.nan)  # unknown until a weight is drawn or a state is loaded
        return self

    def _factors(self, U: Tensor, V: Tensor, s: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """U and V diag(s)."""
        spectrum = self.spectrum if s is None else s
        assert spectrum is not None
        return U, V * spectrum[..., None, :]

    def extra_repr(self) -> str:
        return f"rank={self.rank}, spectrum={self.kind!r}"


def largest_singular(W: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first ``rank`` singular vectors and values U (..., m, r), s (..., r), V (..., n, r) of W, computed in float64.

    Below an eighth of the full rank by a randomized subspace iteration (Halko, Martinsson and Tropp 2011) with a fixed seed,
    which is exact if W has that rank. Otherwise it is nearly the nearest: the faster the singular values fall, the nearer.
    """
    wide = W.double()
    if 8 * rank > min(W.shape[-2:]):
        U, s, Vh = torch.linalg.svd(wide, full_matrices=False)
    else:
        seeded = torch.Generator().manual_seed(0)
        start = torch.randn(W.shape[-1], rank + _OVERSAMPLING, generator=seeded, dtype=torch.float64).to(W.device)
        Q = torch.linalg.qr(wide @ start).Q
        for _ in range(_ITERATIONS):
            Q = torch.linalg.qr(wide @ torch.linalg.qr(wide.mT @ Q).Q).Q
        U, s, Vh = torch.linalg.svd(Q.mT @ wide, full_matrices=False)
        U = Q @ U
    # A zero row of W is one of U. Rounding must not hide this from an optimizer, which divides by the size of gradients.
    factors = (torch.where(factor.abs() < _ROUNDING, 0, factor) for factor in (U[..., :rank], Vh[..., :rank, :].mT))
    U, V = (factor.to(W.dtype).contiguous() for factor in factors)
    return U, s[..., :rank].to(W.dtype).contiguous(), V


@torch.inference_mode(False)
def low_rank(module: M, name: str = "weight", *, rank: int | None = None, spectrum: Spectrum = "free") -> M:
    """Keep ``module.name`` of a given rank: W = U diag(s) Vᵀ, with U (m, r) and V (n, r) on Stiefel.

    The weight starts as the nearest such matrix, from its singular value decomposition; so does every assigned weight. A
    Riemannian optimizer moves U and V, as for :func:`stiefel`. An ``nn.Linear`` multiplies by the two thin factors where that
    takes fewer operations, about r(m + n) < mn per token. Nothing of W's size then exists.

    ``spectrum`` says which singular values W has:

    - "free": s is trained. An entry may change its sign, which changes the sign of a singular vector.
    - "fixed": s keeps the present singular values, also when a weight is assigned. At full rank W is isospectral.
    - "equal": all are one trained number, so that W is a multiple of a partial isometry.

    A convolution is flattened to a matrix; leading dimensions of other weights are batch dimensions.

    Args:
        module: the layer, changed in place and returned. Its weight becomes U; make the optimizer afterwards.
        name: its parameter.
        rank: r, at most min(m, n), which None means.
        spectrum: "free", "fixed" or "equal".

    Raises:
        ValueError: unknown spectrum; a rank that does not fit; a fixed spectrum of zeros; ``name`` as for :func:`stiefel`.

    >>> layer = low_rank(nn.Linear(64, 32), rank=8)
    >>> sum(p.numel() for p in layer.parameters())  # 32 x 8 + 64 x 8 + 8, and the bias
    808
    """
    if spectrum not in get_args(Spectrum):
        raise ValueError(f"unknown spectrum {spectrum!r}; choose one of {', '.join(get_args(Spectrum))}")
    layout = Layout.unchanged(module, name, None, flatten=True)
    full = min(layout.matrix_shape[-2:])
    precision.check_int("rank", full if rank is None else rank, 1)
    if rank is not None and rank > full:
        raise ValueError(f"expected rank to be at most {full} for {type(module).__name__}.{name} {layout}, got {rank}")
    weight = getattr(module, name)
    if spectrum == "fixed" and autograd.has_data(weight) and not weight.any():
        raise ValueError(
            f"expected {type(module).__name__}.{name} to have a spectrum to keep, but it is zero and would stay so"
        )
    return register(module, name, LowRank(layout, weight.dtype, rank or full, spectrum))


def isospectral(module: M, name: str = "weight") -> M:
    """Keep the singular values of ``module.name``: :func:`low_rank` of full rank with ``spectrum="fixed"``.

    The weight itself does not change. POET keeps the spectrum too, through any optimizer: :func:`equivalence`.
    """
    return low_rank(module, name, spectrum="fixed")
