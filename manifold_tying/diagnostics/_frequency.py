"""Tokens by how often they occur: buckets of counts, and row norms of a table in them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BucketNorms:
    """Row norms of the tokens of one frequency bucket."""

    bucket: str
    tokens: int
    mean: float
    smallest: float
    largest: float


@dataclass(frozen=True, slots=True)
class RowNorms:
    """Row norms of a table against token frequency."""

    buckets: list[BucketNorms]
    rank_correlation: float
    """Spearman's, of norm and count over all tokens, in [-1, 1]; NaN where one of them is constant."""


def frequency_buckets(counts: Tensor) -> list[tuple[str, Tensor]]:
    """(label, token ids) of the tokens that never occur, then per power of ten: 0, 1-9, 10-99, ...; empty ones left out."""
    if counts.ndim != 1 or counts.is_floating_point() or counts.dtype == torch.bool or (counts < 0).any():
        raise ValueError(
            f"expected whole counts (V,) >= 0, got {counts.dtype} {tuple(counts.shape)}; use torch.bincount"
        )
    buckets = [("0", (counts == 0).nonzero()[:, 0])]
    low = 1
    while (counts >= low).any():
        label = "1-9" if low == 1 else f"{low}-{10 * low - 1}"
        buckets.append((label, ((counts >= low) & (counts < 10 * low)).nonzero()[:, 0]))
        low *= 10
    return [(label, tokens) for label, tokens in buckets if len(tokens)]


def row_norms(table: Tensor, counts: Tensor) -> RowNorms:
    """Norms of the rows of a table (V, d), a memory's or an embedding's, against how often each token occurs, counts (V,).

    The rows of an orthonormal memory have squared norms that sum to d: a token can only gain what others lose.
    """
    if table.ndim != 2 or counts.shape != table.shape[:1]:
        raise ValueError(f"expected a table (V, d) and counts (V,), got {tuple(table.shape)} and {tuple(counts.shape)}")
    from scipy.stats import spearmanr  # here, for it takes longer to import than the rest of the package

    norms = torch.linalg.vector_norm(table.detach(), dim=1, dtype=torch.float64)
    buckets = [
        BucketNorms(label, len(tokens), *(f(norms[tokens]).item() for f in (torch.mean, torch.amin, torch.amax)))
        for label, tokens in frequency_buckets(counts)
    ]
    constant = bool((norms == norms[0]).all() or (counts == counts[0]).all())
    return RowNorms(buckets, float("nan") if constant else float(spearmanr(norms.cpu(), counts.cpu()).statistic))
