"""Riemannian Adam."""

from typing import Any, Literal, get_args

import geoopt
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from manifold_tying.manifolds import Stiefel
from manifold_tying.optim._base import Group, NonFinite, RiemannianOptimizer, check_kernels, check_range

SecondMoment = Literal["element", "row", "matrix"]
_AVERAGED_OVER: dict[str, tuple[int, ...]] = {"element": (), "row": (-1,), "matrix": (-2, -1)}


class RiemannianAdam(RiemannianOptimizer):
    """Adam for points of manifolds, and bit for bit torch.optim.AdamW for all other parameters.

    On our :class:`~manifold_tying.Stiefel` the moments are those of the Riemannian gradient, kept in the ambient space
    without transport; the direction m̂ / (√v̂ + eps) is projected to the tangent space, then retracted: six products of
    2np² operations a step. The gradient has to be projected before the moments see it: its normal part does not vanish
    at an optimum, and an element-wise division turns some of it into motion (docs/learning-rates.md has the numbers).
    On any other geoopt manifold
    it is geoopt's RiemannianAdam: moments of the Riemannian gradient, the first one transported (Bécigneul and Ganea 2019).

    Args:
        params: tensors, (name, tensor) pairs or groups; see ``param_groups``.
        lr: learning rate, a float or a one-element tensor.
        betas, eps: as in Adam.
        weight_decay: decoupled, for ordinary parameters only: it never acts on a point.
        second_moment: on Stiefel, one second moment per "element", per "row" or per "matrix" (mean of squares). The latter
            two make the trajectory independent of the basis of the columns.
        retract_every: measure the Gram matrix of a Stiefel point every so many steps, and in between predict it from the
            previous point's, which is cheaper and carries that point's rounding along. Polar retraction only.
        maximize: ascend.
        foreach, fused: as in torch.optim.AdamW, for ordinary parameters.
        nonfinite: "raise" a ValueError on a NaN or Inf gradient, or "skip" that step.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        second_moment: SecondMoment = "element",
        retract_every: int = 1,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        nonfinite: NonFinite = "raise",
    ) -> None:
        check_kernels(lr, foreach, fused)
        if foreach and isinstance(lr, Tensor):
            raise ValueError("foreach=True does not go with a tensor lr; leave one of them out")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "second_moment": second_moment,
            "retract_every": retract_every,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, defaults, nonfinite)

    def _check_options(self, group: Group) -> None:
        check_range(group, lr=0, eps=0, weight_decay=0)
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"expected betas to be two numbers in [0, 1), got {group['betas']}")
        if group["second_moment"] not in get_args(SecondMoment):
            choices = ", ".join(get_args(SecondMoment))
            raise ValueError(f"unknown second_moment {group['second_moment']!r}; choose one of {choices}")

    def _initialize(self, p: Tensor, state: dict[str, Any], group: Group) -> None:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(p)
        manifold = self._manifolds[p]
        if isinstance(manifold, Stiefel):
            state["exp_avg_sq"] = torch.zeros_like(_mean_square(p, group["second_moment"]))
        else:
            state["exp_avg_sq"] = torch.zeros_like(manifold.component_inner(p, p))

    def _euclidean_step(self, group: Group, params: list[Tensor]) -> None:
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), device=p.device) if group["fused"] else torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            has_complex=any(p.is_complex() for p in params),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _riemannian_update(
        self, group: Group, manifold: geoopt.Manifold, points: Tensor, gradients: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        step = int(state["step"])
        if isinstance(manifold, Stiefel):
            gradients = manifold.proju(points, gradients)
            square = _mean_square(gradients, group["second_moment"])
            direction = adam_direction(gradients, square, state, step, group["betas"], group["eps"])
            return manifold.move(points, -group["lr"] * direction, measure=step % group["retract_every"] == 0)
        gradients = manifold.egrad2rgrad(points, gradients)
        square = manifold.component_inner(points, gradients)
        direction = adam_direction(gradients, square, state, step, group["betas"], group["eps"])
        moved, transported = manifold.retr_transp(points, -group["lr"] * direction, state["exp_avg"])
        state["exp_avg"].copy_(transported)
        return moved


def adam_direction(
    gradient: Tensor,
    square: Tensor,
    state: dict[str, Tensor],
    step: int,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """m̂ / (√v̂ + eps) after updating the moments m = ``exp_avg`` and v = ``exp_avg_sq`` in place; ``square`` is g²."""
    beta1, beta2 = betas
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].lerp_(square, 1 - beta2)
    denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(eps)
    return (state["exp_avg"] / (1 - beta1**step)).div_(denominator)


def _mean_square(x: Tensor, second_moment: str) -> Tensor:
    over = _AVERAGED_OVER[second_moment]
    return x.square().mean(over, keepdim=True) if over else x.square()
