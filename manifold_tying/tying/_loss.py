"""Cross-entropy of a vocabulary head that holds one chunk of the logits at a time."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manifold_tying import autograd, distributed, precision
from manifold_tying.tying._vocabulary import VocabularyShard

# Token chunks: the fewest that keep peak memory under 10 % of the logits in the matmul dtype. Matmuls with few rows are slow,
# and each chunk reads and writes the gradient of the full table. In low precision each chunk is copied to float32 in pieces. A
# CPU without low-precision products multiplies in float32, in twice as many chunks.
CHUNKS = 12
CHUNKS_LOW_PRECISION = 18
PIECES = 4  # float32 pieces per chunk
# On a GPU launching a kernel takes longer than running it on few logits: no pieces, and no more chunks than this size needs.
GPU_CHUNK = 2**25


def linear_cross_entropy(hidden: Tensor, table: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Mean of logsumexp(x) - x[target] over the counted positions, x = hidden tableᵀ, in nats, a float32 scalar.

    Args:
        hidden: (..., d).
        table: (V, d). For a DTensor sharded by rows the logits stay sharded; the ranks, which all have the same hidden states
            and targets, all-reduce three numbers per token and the gradient of ``hidden``.
        targets: (...), int64 in [0, V) or ``ignore_index``.
        ignore_index: positions with this target do not count; the loss is 0 if none counts.

    The tokens are processed in chunks, and the gradient of each chunk is computed while its logits are in memory. The matmuls
    run in the autocast dtype, otherwise in that of ``hidden``; softmax, sums over chunks and the result are float32 (or
    float64). A CPU that would emulate 16-bit matmuls runs them in float32, on inputs rounded to 16 bits. Second derivatives
    and torch.func transforms hold all logits.
    """
    if table.ndim != 2 or hidden.shape[-1] != table.shape[1]:
        raise ValueError(
            f"expected hidden (..., d) and table (V, d), got {tuple(hidden.shape)} and {tuple(table.shape)}"
        )
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"expected one target for each of {tuple(hidden.shape[:-1])}, got {tuple(targets.shape)}")
    if targets.dtype != torch.int64:
        raise ValueError(f"expected int64 targets, got {targets.dtype}; convert them with targets.long()")
    dtype = precision.autocast_dtype(hidden)
    grad = torch.is_grad_enabled()  # must be read here: it is off inside an autograd.Function
    wanted = (grad and hidden.requires_grad, grad and table.requires_grad)
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows, vocabulary = distributed.to_local(table), VocabularyShard.of(table)
    return _chunked(flat, rows, targets.flatten(), vocabulary, ignore_index, dtype, wanted)


def _loss_and_gradients(
    hidden: Tensor,
    table: Tensor,
    targets: Tensor,
    vocabulary: VocabularyShard,
    ignore_index: int,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Mean loss and, where wanted, its gradients with respect to hidden and to this rank's rows of the table."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    product = precision.product_dtype(dtype, hidden.device)
    h, W = hidden.to(dtype).to(product), table.to(dtype).to(product)
    parts = CHUNKS * wide.itemsize // dtype.itemsize if product == wide else CHUNKS_LOW_PRECISION
    dtype = product
    counted = (targets != ignore_index)[:, None]
    scale = 1 / counted.sum().clamp_min(1).to(wide)
    index, is_local = vocabulary.index(targets[:, None].masked_fill(~counted, 0))
    loss = torch.zeros((), dtype=wide, device=h.device)
    # float16 gradients of a mean over many tokens underflow until the backward multiplies them by the loss scale.
    held = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    grad_hidden = torch.empty_like(hidden, dtype=held) if wanted[0] else None
    grad_table = torch.zeros_like(table, dtype=wide) if wanted[1] else None
    parts = -(-parts // vocabulary.world_size)
    if h.is_cuda:
        parts = max(1, min(parts, -(-len(h) * len(W) // GPU_CHUNK)))
    rows = max(1, -(-len(h) // parts))
    logits = torch.empty(min(rows, len(h)), len(W), dtype=dtype, device=h.device)
    # Compiled code makes no copies, and its size is in the number of pieces.
    pieces = 1 if dtype == wide or h.is_cuda or torch.compiler.is_compiling() else PIECES
    piece = max(1, -(-len(logits) // pieces))
    for start in range(0, len(h), rows):
        part = slice(start, start + rows)
        h_part = h[part].masked_fill(~counted[part], 0)
        p = torch.mm(h_part, W.mT, out=logits[: len(h_part)])
        for first in range(0, len(p), piece):
            own = slice(start + first, min(start + first + piece, start + len(p)))
            losses = _subtract_targets_(p[first : first + piece], index[own], is_local[own], vocabulary, any(wanted))
            # Out of place: see linalg._cayley on what a forward returns.
            loss = loss + losses.masked_fill(~counted[own], 0).sum()
        if grad_hidden is not None:
            grad_hidden[part] = (p @ W).to(held) * (scale * counted[part])
        if grad_table is not None:
            if dtype == wide:
                grad_table.addmm_(p.mT, h_part)
            else:  # a block of rows at a time, which on a CPU stays in its cache
                for block in precision.row_chunks(grad_table):
                    grad_table[block] += p[:, block].mT @ h_part
    if grad_hidden is not None:
        (grad_hidden,) = vocabulary.all_reduce(grad_hidden)
    return loss * scale, grad_hidden, None if grad_table is None else grad_table.mul_(scale).to(table.dtype)


def _subtract_targets_(
    p: Tensor, index: Tensor, is_local: Tensor, vocabulary: VocabularyShard, wants_gradient: bool
) -> Tensor:
    """Cross-entropy (n, 1) of the logits p (n, V), which become its gradient: softmax(p) less the one-hot targets."""
    wide = precision.compute_dtype(p.dtype)
    if p.is_cuda and vocabulary.world_size == 1:  # in fewer passes over the logits, with a float32 copy of them
        log_p = torch.log_softmax(p, 1, dtype=wide)
        target = log_p.gather(1, index)
        if wants_gradient:
            torch.exp(log_p, out=p)
            p.scatter_(1, index, target.expm1().to(p.dtype))
        return -target
    x = p.to(wide)
    target = vocabulary.gather(x, index, is_local)
    largest = vocabulary.max(x)
    total = x.sub_(largest).exp_().sum(1, keepdim=True)
    target, total = vocabulary.all_reduce(target, total)
    if wants_gradient:
        x.div_(total)
        if x.shape[1]:
            x.scatter_add_(1, index, -is_local.to(wide))
        if x is not p:
            p.copy_(x)
    return total.log() + largest - target


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """The loss of the arguments of :func:`_loss_and_gradients`."""
        autograd.save(ctx, args)
        ctx.float16 = args[0].dtype == torch.float16
        with precision.disable_autocast(args[0].device):
            loss, *ctx.gradients = _loss_and_gradients(*args)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        # Scaled in place and released, so that no second (V, d) tensor is held; a second backward recomputes them.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            with precision.disable_autocast(grad.device):
                gradients = _loss_and_gradients(*autograd.saved(ctx)[0])[1:]
        hidden, table = (g if g is None else g.mul_(grad) for g in gradients)
        if hidden is not None and ctx.float16:
            hidden = hidden.half()
        return hidden, table, None, None, None, None, None


def _with_all_logits(
    hidden: Tensor,
    table: Tensor,
    targets: Tensor,
    vocabulary: VocabularyShard,
    ignore_index: int,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
) -> Tensor:
    wide = precision.compute_dtype(dtype)
    counted = targets != ignore_index
    index, is_local = vocabulary.index(targets.masked_fill(~counted, 0)[:, None])
    with precision.disable_autocast(hidden.device):
        x = F.linear(vocabulary.copy_to_ranks(hidden.to(dtype)), table.to(dtype)).to(wide)
        largest = vocabulary.max(x.detach())
        total = vocabulary.reduce_from_ranks((x - largest).exp().sum(1, keepdim=True))
        losses = total.log() + largest - vocabulary.reduce_from_ranks(vocabulary.gather(x, index, is_local))
        return (losses[:, 0] * counted).sum() / counted.sum().clamp_min(1)


_chunked = autograd.custom_gradient(_LinearCrossEntropy, _with_all_logits)
