"""Cross-entropy of logits and its gradient in one kernel."""

import torch
from torch import Tensor

BLOCK, WARPS = 8192, 16  # columns of a row that are in registers at a time, and the warps that share them


def cross_entropy_(logits: Tensor, targets: Tensor, ignore_index: int = -100, wants_gradient: bool = True) -> Tensor:
    """logsumexp(x) - x[target] for each row x of the logits, (n,) in float32; 0 for ignored rows.

    Args:
        logits: (n, V) in float32, bfloat16 or float16 on a CUDA device, with adjacent columns. If a gradient is wanted they
            become it, softmax(x) less the one-hot target, or 0 in ignored rows. Otherwise they stay.
        targets: (n,), int64 in [0, V) or ``ignore_index``. The loss of any other target is NaN.
    """
    from manifold_tying.kernels._triton_cross_entropy import cross_entropy_kernel  # Triton is optional

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(len(logits),)](
            logits,
            logits.stride(0),
            targets,
            losses,
            logits.shape[1],
            ignore_index,
            WRITE=wants_gradient,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return losses
