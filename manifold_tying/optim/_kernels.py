"""torch's own Adam updates, on lists of tensors and with the options of a parameter group."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from manifold_tying.optim._base import Group


def _options(group: Group, *, fused: bool) -> dict[str, Any]:
    lr = group["lr"]
    return {
        "lr": lr.item() if fused and isinstance(lr, Tensor) and lr.device.type == "cpu" else lr,
        "beta1": group["betas"][0],
        "beta2": group["betas"][1],
        "eps": group["eps"],
        "maximize": group["maximize"],
        "amsgrad": False,
    }


def adamw_(
    group: Group,
    params: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    found_inf: Tensor | None,
) -> None:
    """The update of torch.optim.AdamW, in place; leaves everything as it is where ``found_inf`` is 1."""
    adamw(
        params,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        foreach=None if group["fused"] else group["foreach"],
        fused=group["fused"],
        has_complex=any(p.is_complex() for p in params),
        found_inf=found_inf,
        weight_decay=group["weight_decay"],
        **_options(group, fused=bool(group["fused"])),
    )


def fused_adamw_(
    group: Group,
    params: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    found_inf: Tensor | None,
) -> None:
    """The kernel behind ``adamw(fused=True)``, without weight decay.

    Called directly, since the sorting by device and dtype above it takes longer than the step of a small point.
    """
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        params,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        weight_decay=0.0,
        grad_scale=None,
        found_inf=found_inf,
        **_options(group, fused=True),
    )
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))
