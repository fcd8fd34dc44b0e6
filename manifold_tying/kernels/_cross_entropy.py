"""Cross-entropy of logits and its gradient in one kernel."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK, WARPS = 8192, 16  # columns of a row that are in registers at a time, and the warps that share them


class LossForm(NamedTuple):
    """z, s and c of :func:`manifold_tying.tying.linear_cross_entropy`."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    softcap: float | None = None


PLAIN = LossForm()


def cross_entropy_(
    logits: Tensor, targets: Tensor, weights: Tensor, wants_gradient: bool = True, form: LossForm = PLAIN
) -> Tensor:
    """w (lse - (1 - s) x[target] - s mean(x) + z lse²) for each row x of the logits, (n,) in float32; 0 where w is 0.

    Args:
        logits: (n, V) in float32, bfloat16 or float16 on a CUDA device, with adjacent columns. If a gradient is wanted they
            become it. Otherwise they stay.
        targets: (n,), int64 in [0, V). The loss of any other target is NaN, but where w is 0.
        weights: w, (n,) or (n, 1), float32.
        form: z, s and c; with a c, x is c tanh(logits / c).
    """
    from manifold_tying.kernels._triton_cross_entropy import cross_entropy_kernel  # Triton is optional

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(len(logits),)](
            logits, logits.stride(0), targets, weights, losses, logits.shape[1],
            float(form.z_loss), float(form.label_smoothing), float(form.softcap or 0),
            SMOOTH=form.label_smoothing > 0, CAP=form.softcap is not None, WRITE=wants_gradient, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return losses
