"""Cross-entropy of a vocabulary head that never holds all the logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.tying._vocabulary import Vocabulary

# Parts that the tokens are processed in, as few as keep the memory below a tenth of all logits in the dtype of the products:
# a product of few rows is slow, and each part reads and writes the table's whole gradient. One part's logits are held and
# worked on in place, those of lower precision by way of a float32 copy of a piece of the rows.
CHUNKS = 12
CHUNKS_LOW_PRECISION = 18
PIECES = 4  # of a part in lower precision


def linear_cross_entropy(hidden: Tensor, table: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Mean over the counted positions of logsumexp(x) - x[target], x = hidden tableᵀ, in nats, a float32 scalar.

    Args:
        hidden: (..., d).
        table: (V, d); as a DTensor sharded by rows the logits stay with the rows, and the processes, which all have the same
            hidden states and targets, sum what a softmax needs: three numbers per token, and the gradient of ``hidden``.
        targets: (...), int64 in [0, V) or ``ignore_index``.
        ignore_index: positions with this target do not count; the loss is 0 when none counts.

    The tokens are processed in chunks, and each chunk's gradient is taken while its logits are there. The products run in
    the dtype of autocast, else in that of ``hidden``; softmax, sums over chunks and the scalar are float32 (or float64).
    A second derivative and any torch.func transform hold all the logits.
    """
    if table.ndim != 2 or hidden.shape[-1] != table.shape[1]:
        raise ValueError(
            f"expected hidden (..., d) and table (V, d), got {tuple(hidden.shape)} and {tuple(table.shape)}"
        )
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"expected one target for each of {tuple(hidden.shape[:-1])}, got {tuple(targets.shape)}")
    if targets.dtype != torch.int64:
        raise ValueError(f"expected int64 targets, got {targets.dtype}; convert them with targets.long()")
    dtype = linalg.autocast_dtype(hidden)
    grad = torch.is_grad_enabled()  # off inside of an autograd.Function, so it is asked here
    wanted = (grad and hidden.requires_grad, grad and table.requires_grad)
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows, vocabulary = linalg.to_local(table), Vocabulary.of(table)
    return _chunked(flat, rows, targets.flatten(), vocabulary, ignore_index, dtype, wanted)


def _loss_and_gradients(
    hidden: Tensor,
    table: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary,
    ignore_index: int,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Mean loss and its gradients with respect to hidden and to the rows of the table at hand, where wanted."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    h, W = hidden.to(dtype), table.to(dtype)
    counted = targets != ignore_index
    weight = counted.to(wide) / counted.sum().clamp_min(1)
    index, here = vocabulary.index(targets.masked_fill(~counted, 0)[:, None])
    loss = torch.zeros((), dtype=wide, device=h.device)
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_table = torch.zeros_like(table, dtype=wide) if wanted[1] else None
    parts = -(-(CHUNKS if dtype == wide else CHUNKS_LOW_PRECISION) // vocabulary.processes)
    rows = max(1, -(-len(h) // parts))
    logits = torch.empty(min(rows, len(h)), len(W), dtype=dtype, device=h.device)
    # Compiled code makes no copies, and its size is in the number of pieces.
    pieces = 1 if dtype == wide or torch.compiler.is_compiling() else PIECES
    piece = max(1, -(-len(logits) // pieces))
    copy = None if dtype == wide else torch.empty(piece, len(W), dtype=wide, device=h.device)
    for start in range(0, len(h), rows):
        part = slice(start, start + rows)
        p = torch.mm(h[part], W.mT, out=logits[: len(h[part])])
        for first in range(0, len(p), piece):
            given = p[first : first + piece]
            own = slice(start + first, start + first + len(given))
            x = given if copy is None else copy[: len(given)].copy_(given)
            picked = vocabulary.pick(x, index[own], here[own])
            largest = vocabulary.largest(x)
            total = x.sub_(largest).exp_().sum(1, keepdim=True)
            picked, total = vocabulary.add(picked, total)
            # Out of place: see linalg._cayley on what a forward returns.
            loss = loss + ((total.log() + largest - picked)[:, 0] * weight[own]).sum()
            if grad_hidden is None and grad_table is None:
                continue
            x.mul_(weight[own, None] / total)  # softmax; less the one-hot target it is the gradient of the logits
            if x.shape[1]:
                x.scatter_add_(1, index[own], -weight[own, None] * here[own])
            if x is not given:
                given.copy_(x)
        if grad_hidden is not None:
            grad_hidden[part] = p @ W
        if grad_table is not None:
            if dtype == wide:
                grad_table.addmm_(p.mT, h[part])
            else:  # a block of rows at a time, which on a CPU stays in its cache
                for block in linalg.row_chunks(grad_table):
                    grad_table[block] += p[:, block].mT @ h[part]
    if grad_hidden is not None:
        (grad_hidden,) = vocabulary.add(grad_hidden)
    return loss, grad_hidden, None if grad_table is None else grad_table.to(table.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        table: Tensor,
        targets: Tensor,
        vocabulary: Vocabulary,
        ignore_index: int,
        dtype: torch.dtype,
        wanted: tuple[bool, bool],
    ) -> Tensor:
        args = (hidden, table, targets, vocabulary, ignore_index, dtype, wanted)
        linalg.save(ctx, args)
        with linalg.disable_autocast(hidden.device):
            loss, *ctx.gradients = _loss_and_gradients(*args)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        # Scaled in place and given away, so that no second (V, d) tensor is held; a second backward computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            with linalg.disable_autocast(grad.device):
                gradients = _loss_and_gradients(*linalg.saved(ctx)[0])[1:]
        hidden, table = (g if g is None else g.mul_(grad) for g in gradients)
        return hidden, table, None, None, None, None, None


def _with_all_logits(
    hidden: Tensor,
    table: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary,
    ignore_index: int,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
) -> Tensor:
    wide = linalg.compute_dtype(dtype)
    counted = targets != ignore_index
    index, here = vocabulary.index(targets.masked_fill(~counted, 0)[:, None])
    with linalg.disable_autocast(hidden.device):
        x = F.linear(vocabulary.shared(hidden.to(dtype)), table.to(dtype)).to(wide)
        largest = vocabulary.largest(x.detach())
        total = vocabulary.summed((x - largest).exp().sum(1, keepdim=True))
        losses = total.log() + largest - vocabulary.summed(vocabulary.pick(x, index, here))
        return (losses[:, 0] * counted).sum() / counted.sum().clamp_min(1)


_chunked = linalg.custom_gradient(_LinearCrossEntropy, _with_all_logits)
