"""Cross-entropy of a vocabulary head that holds one chunk of the logits at a time."""

import math
from typing import Any, Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from manifold_tying import autograd, distributed, kernels, precision
from manifold_tying.kernels import LossForm
from manifold_tying.tying._vocabulary import VocabularyShard

# Token chunks: the fewest that keep peak memory under 10 % of the logits in the matmul dtype. Matmuls with few rows are slow,
# and each chunk reads and writes the gradient of the full table. In low precision each chunk is copied to float32. A
# CPU without low-precision products multiplies in float32, in twice as many chunks.
CHUNKS = 12
CHUNKS_LOW_PRECISION = 36
# On a GPU, launching a kernel takes longer than running it on few logits: chunks of at least so many logits.
GPU_CHUNK = 2**26
GPU_TILE = 128  # products work in tiles: a chunk has a multiple of so many tokens

Reduction = Literal["mean", "sum", "none"]


class LossOptions(TypedDict, total=False):
    """The options of :func:`linear_cross_entropy`, which the ``loss`` of every interface takes, too."""

    ignore_index: int
    reduction: Reduction
    token_weight: Tensor | None
    z_loss: float
    label_smoothing: float
    softcap: float | None


def linear_cross_entropy(
    hidden: Tensor,
    table: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    token_weight: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Cross-entropy in nats of logits x = hidden tableᵀ, which never exist as a whole, in float32 (float64 for float64).

    The loss of a token is w (lse - (1 - s) x[target] - s mean(x) + z lse²), with lse = logsumexp(x).

    Args:
        hidden: (..., d).
        table: (V, d). For a DTensor sharded by rows the logits stay sharded; the ranks, which all have the same hidden states
            and targets, all-reduce three or four numbers per token and the gradient of ``hidden``.
        targets: (...), int64 in [0, V) or ``ignore_index``.
        ignore_index: positions with this target do not count; their loss is 0.
        reduction: "mean" divides the sum by that of w, and is 0 if that is 0. "sum" suits micro-batches of unequal lengths.
            "none" gives (...), but its backward computes the logits again: four products in place of three.
        token_weight: w (...), a constant; None is 1.
        z_loss: z, which keeps lse near 0 (PaLM has 1e-4).
        label_smoothing: s in [0, 1], as in torch's cross_entropy.
        softcap: c; the logits are then c tanh(x / c), as in Gemma 2.

    Raises:
        ValueError: shapes or dtypes do not fit, or an option is out of range.

    The tokens are processed in chunks, and the gradient of each chunk is computed while its logits are in memory. The matmuls
    run in the autocast dtype, otherwise in that of ``hidden``; softmax, sums over chunks and the result are float32 (or
    float64). A CPU that would emulate 16-bit matmuls runs them in float32, on inputs rounded to 16 bits. Second derivatives
    and torch.func transforms hold all logits.
    """
    if table.ndim != 2 or hidden.shape[-1] != table.shape[1]:
        found = f"{tuple(hidden.shape)} and {tuple(table.shape)}"
        raise ValueError(f"expected hidden (..., d) and table (V, d), got {found}")
    for what, given in (("target", targets), ("token_weight", token_weight)):
        if given is not None and hidden.shape[:-1] != given.shape:
            raise ValueError(f"expected one {what} for each of {tuple(hidden.shape[:-1])}, got {tuple(given.shape)}")
    if targets.dtype != torch.int64:
        raise ValueError(f"expected int64 targets, got {targets.dtype}; convert them with targets.long()")
    precision.compute_dtype(table.dtype)
    precision.check_choice("reduction", reduction, Reduction)
    if not (0 <= z_loss < math.inf and 0 <= label_smoothing <= 1 and (softcap is None or 0 < softcap < math.inf)):
        raise ValueError(
            "expected z_loss >= 0, label_smoothing from 0 to 1 and softcap > 0 or None, all finite, got "
            f"{z_loss}, {label_smoothing} and {softcap}"
        )
    dtype = precision.autocast_dtype(hidden)
    grad = torch.is_grad_enabled()  # must be read here: it is off inside an autograd.Function
    wanted = (grad and hidden.requires_grad, grad and table.requires_grad)
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows, vocabulary = distributed.to_local(table), VocabularyShard.of(table)
    weights = (targets != ignore_index).flatten().to(precision.compute_dtype(dtype))
    if token_weight is not None:
        weights = torch.where(weights != 0, token_weight.detach().flatten().to(weights.dtype), 0)  # 0 NaN is NaN
    scale = weights.new_ones(())
    if token_weight is not None and reduction != "none":  # their product with softmax has 16 bits in low precision
        scale = torch.cat([weights.abs(), scale.new_full((1,), 1e-30)]).amax()
        weights = weights / scale
    if reduction == "mean":
        scale = torch.where((total := weights.sum()) == 0, 0, 1 / total)
    form, each = LossForm(z_loss, label_smoothing, softcap), reduction == "none"
    loss = _chunked(flat, rows, targets.flatten(), weights[:, None], vocabulary, form, dtype, wanted, scale, each)
    return loss.reshape(targets.shape) if each else loss


def _losses_and_gradients(
    hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor, vocabulary: VocabularyShard,
    form: LossForm, dtype: torch.dtype, wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Weighted losses (n,) and, where wanted, the gradients of their sum for hidden and, in 32 bits, this rank's rows."""
    wide = weights.dtype
    product = precision.product_dtype(dtype, hidden.device)
    h, W = hidden.to(dtype).to(product), table.to(dtype).to(product)
    fused = vocabulary.world_size == 1 and kernels.runs_triton(h)
    parts = CHUNKS * wide.itemsize // dtype.itemsize if product == wide else CHUNKS if fused else CHUNKS_LOW_PRECISION
    if form.softcap is not None and not fused:
        parts *= 2  # its slope is another tensor of the logits' size
    dtype = product
    counted = weights != 0
    losses = [torch.zeros(0, dtype=wide, device=h.device)]
    if not fused:
        index, is_local = vocabulary.index(torch.where(counted, targets[:, None], 0))
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_table = (torch.empty_like if len(h) else torch.zeros_like)(table, dtype=wide) if wanted[1] else None
    rows = max(1, -(-len(h) * vocabulary.world_size // parts))
    if h.is_cuda:
        rows = -(-max(rows, GPU_CHUNK // max(1, len(W))) // GPU_TILE) * GPU_TILE
    width = -(-len(W) // GPU_TILE) * GPU_TILE if fused else len(W)  # rows aligned in memory
    logits = torch.empty(min(rows, len(h)), width, dtype=dtype, device=h.device)[:, : len(W)]
    zero = h.new_zeros(())
    for start in range(0, len(h), rows):
        part = slice(start, start + rows)
        h_part = torch.where(counted[part], h[part], zero)  # 0 Inf is NaN, in the table's gradient
        p = torch.mm(h_part, W.mT, out=logits[: len(h_part)])
        if fused:
            losses.append(kernels.cross_entropy_(p, targets[part], weights[part], any(wanted), form))
        else:
            where = index[part], is_local[part], weights[part]
            losses.append(_subtract_targets_(p, *where, vocabulary, form, any(wanted)))
        if grad_hidden is not None:
            kernels.add_product_(grad_hidden[part], p, W, beta=0)
        if grad_table is not None:
            kernels.add_product_(grad_table, p.mT, h_part, beta=min(start, 1))
    if grad_hidden is not None:
        (grad_hidden,) = vocabulary.all_reduce(grad_hidden)
    return torch.cat(losses), grad_hidden, grad_table


def _subtract_targets_(
    p: Tensor,
    index: Tensor,
    is_local: Tensor,
    weights: Tensor,
    vocabulary: VocabularyShard,
    form: LossForm,
    write: bool,
) -> Tensor:
    """:func:`manifold_tying.kernels.cross_entropy_` by PyTorch's operations, also for this rank's columns of the logits."""
    x, (z, smoothing, cap), V = p.to(weights.dtype), form, vocabulary.total
    if cap is not None:
        x = x.div_(cap).tanh_().mul_(cap)
    slope = None if cap is None or not write else (x / cap).square_().neg_().add_(1)
    sums = [vocabulary.gather(x, index, is_local)] + ([x.sum(1, keepdim=True)] if smoothing else [])
    largest = vocabulary.max(x)
    total = x.sub_(largest).exp_().sum(1, keepdim=True)
    total, target, *rest = vocabulary.all_reduce(total, *sums)
    lse = total.log() + largest
    loss = lse - (1 - smoothing) * target + z * lse * lse
    if rest:
        loss = loss - smoothing / V * rest[0]
    if write:
        x.mul_(weights * (1 + 2 * z * lse) / total)
        if smoothing:
            x.sub_(weights * (smoothing / V))
        if x.shape[1]:
            x.scatter_add_(1, index, weights * is_local * (smoothing - 1))
        if slope is not None:
            x.mul_(slope)
        if x is not p:
            p.copy_(x)
    return (weights * loss).squeeze(1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """The losses of the arguments of :func:`_losses_and_gradients`, each or their scaled sum."""
        autograd.save(ctx, args)
        *_, wanted, scale, each = args
        inputs = *args[:-3], (False, False) if each else wanted
        with precision.disable_autocast(args[0].device):
            losses, *gradients = _losses_and_gradients(*inputs)
        ctx.gradients = None if each else gradients
        return losses if each else losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place and released, so that no second (V, d) tensor is held; a second backward recomputes them.
        gradients, ctx.gradients = ctx.gradients, None
        (hidden, table, targets, weights, *rest, scale, each), _ = autograd.saved(ctx)
        if each:
            weights, grad = weights * grad[:, None], torch.ones_like(scale)
        if gradients is None:
            with precision.disable_autocast(grad.device):
                gradients = _losses_and_gradients(hidden, table, targets, weights, *rest)[1:]
        grad_hidden, grad_table = gradients
        scale = grad * scale
        if grad_hidden is not None:
            grad_hidden.mul_(scale)
        if grad_table is not None:
            grad_table = grad_table.mul_(scale).to(table.dtype)
        return grad_hidden, grad_table, *[None] * 8


def _with_all_logits(
    hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor, vocabulary: VocabularyShard,
    form: LossForm, dtype: torch.dtype, _: tuple[bool, bool], scale: Tensor, each: bool,
) -> Tensor:  # fmt: skip
    (z, smoothing, cap), V = form, vocabulary.total
    counted = weights != 0
    index, is_local = vocabulary.index(torch.where(counted, targets[:, None], 0))
    with precision.disable_autocast(hidden.device):
        h = torch.where(counted, hidden, 0).to(dtype)
        x = F.linear(vocabulary.copy_to_ranks(h), table.to(dtype)).to(weights.dtype)
        x = x if cap is None else cap * (x / cap).tanh()
        largest = vocabulary.max(x.detach())
        lse = vocabulary.reduce_from_ranks((x - largest).exp().sum(1, keepdim=True)).log() + largest
        aims = (1 - smoothing) * vocabulary.gather(x, index, is_local)
        aims = aims + smoothing / V * x.sum(1, keepdim=True) if smoothing else aims
        losses = (weights * (lse - vocabulary.reduce_from_ranks(aims) + z * lse * lse)).squeeze(1)
        return losses if each else losses.sum() * scale


_chunked = autograd.custom_gradient(_LinearCrossEntropy, _with_all_logits)
