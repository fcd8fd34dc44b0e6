"""Cross-entropy of a vocabulary head that holds one chunk of the logits at a time."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manifold_tying import autograd, distributed, kernels, precision
from manifold_tying.tying._vocabulary import VocabularyShard

# Token chunks: the fewest that keep peak memory under 10 % of the logits in the matmul dtype. Matmuls with few rows are slow,
# and each chunk reads and writes the gradient of the full table. In low precision each chunk is copied to float32 in pieces. A
# CPU without low-precision products multiplies in float32, in twice as many chunks.
CHUNKS = 12
CHUNKS_LOW_PRECISION = 18
PIECES = 4  # float32 pieces per chunk
# On a GPU, launching a kernel takes longer than running it on few logits: no pieces, and chunks of at least so many logits.
GPU_CHUNK = 2**26
GPU_TILE = 128  # products work in tiles: a chunk has a multiple of so many tokens


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
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Mean loss and, where wanted, gradients of the summed loss for hidden and this rank's rows; 1 / counted positions.

    The gradient of a 16-bit table is that of the mean.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    product = precision.product_dtype(dtype, hidden.device)
    h, W = hidden.to(dtype).to(product), table.to(dtype).to(product)
    fused = vocabulary.world_size == 1 and kernels.runs_triton(h)
    parts = CHUNKS * wide.itemsize // dtype.itemsize if product == wide else CHUNKS if fused else CHUNKS_LOW_PRECISION
    dtype = product
    counted = (targets != ignore_index)[:, None]
    scale = 1 / counted.sum().clamp_min(1).to(wide)
    losses = [torch.zeros(0, dtype=wide, device=h.device)]
    if not fused:
        index, is_local = vocabulary.index(targets[:, None].masked_fill(~counted, 0))
    # float16 gradients of a mean over many tokens underflow until the backward multiplies them by the loss scale.
    held = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    grad_hidden = torch.empty_like(hidden, dtype=held) if wanted[0] else None
    grad_table = (torch.empty_like if len(h) else torch.zeros_like)(table, dtype=wide) if wanted[1] else None
    rows = max(1, -(-len(h) * vocabulary.world_size // parts))
    if h.is_cuda:
        rows = -(-max(rows, GPU_CHUNK // max(1, len(W))) // GPU_TILE) * GPU_TILE
    width = -(-len(W) // GPU_TILE) * GPU_TILE if fused else len(W)  # rows aligned in memory
    logits = torch.empty(min(rows, len(h)), width, dtype=dtype, device=h.device)[:, : len(W)]
    # Compiled code makes no copies, and its size is in the number of pieces.
    pieces = 1 if dtype == wide or h.is_cuda or torch.compiler.is_compiling() else PIECES
    piece = max(1, -(-len(logits) // pieces))
    zero = h.new_zeros(())
    for start in range(0, len(h), rows):
        part = slice(start, start + rows)
        h_part = torch.where(counted[part], h[part], zero)  # 0 Inf is NaN, in the table's gradient
        p = torch.mm(h_part, W.mT, out=logits[: len(h_part)])
        if fused:
            losses.append(kernels.cross_entropy_(p, targets[part], ignore_index, any(wanted)))
        else:
            for first in range(0, len(p), piece):
                own = slice(start + first, min(start + first + piece, start + len(p)))
                where = index[own], is_local[own], counted[own]
                losses.append(_subtract_targets_(p[first : first + piece], *where, vocabulary, any(wanted)))
        if grad_hidden is not None:
            kernels.add_product_(grad_hidden[part], p, W, beta=0)
        if grad_table is not None:
            kernels.add_product_(grad_table, p.mT, h_part, beta=min(start, 1))
    if grad_hidden is not None:
        (grad_hidden,) = vocabulary.all_reduce(grad_hidden)
    if grad_table is not None and table.dtype != wide:
        grad_table = grad_table.mul_(scale).to(table.dtype)
    return torch.cat(losses).sum() * scale, grad_hidden, grad_table, scale


def _subtract_targets_(
    p: Tensor, index: Tensor, is_local: Tensor, counted: Tensor, vocabulary: VocabularyShard, wants_gradient: bool
) -> Tensor:
    """:func:`manifold_tying.kernels.cross_entropy_` by PyTorch's operations, also for this rank's columns of the logits."""
    x = p.to(precision.compute_dtype(p.dtype))
    target = vocabulary.gather(x, index, is_local)
    largest = vocabulary.max(x)
    total = x.sub_(largest).exp_().sum(1, keepdim=True)
    target, total = vocabulary.all_reduce(target, total)
    if wants_gradient:
        x.mul_(counted / total)
        if x.shape[1]:
            x.scatter_add_(1, index, -(is_local & counted).to(x.dtype))
        if x is not p:
            p.copy_(x)
    return torch.where(counted, total.log() + largest - target, 0).squeeze(1)


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
        hidden, table, scale = gradients
        scale = grad * scale
        if hidden is not None:
            hidden = hidden.mul_(scale)
            hidden = hidden.half() if ctx.float16 else hidden
        if table is not None:
            table.mul_(scale if table.dtype == scale.dtype else grad)
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
