"""Riemannian stochastic gradient descent."""

from typing import Any

import geoopt
import torch
from torch import Tensor
from torch.optim.sgd import sgd

from manifold_tying.manifolds import Stiefel
from manifold_tying.optim._base import Group, NonFinite, RiemannianOptimizer, check_kernels, check_range


class RiemannianSGD(RiemannianOptimizer):
    """Gradient descent with momentum for points of manifolds, and bit for bit torch.optim.SGD for all other parameters.

    On our :class:`~manifold_tying.Stiefel` the momentum lives in the ambient space and the direction is projected to the
    tangent space; on any other geoopt manifold it is kept in the tangent space and transported, as geoopt does.

    Args:
        params: tensors, (name, tensor) pairs or groups; see ``param_groups``.
        lr: learning rate, a float or a one-element tensor.
        momentum, dampening, nesterov, foreach, fused: as in torch.optim.SGD.
        weight_decay: L2 penalty, for ordinary parameters only: it never acts on a point.
        retract_every, maximize, nonfinite: as in :class:`RiemannianAdam`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        retract_every: int = 1,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        nonfinite: NonFinite = "raise",
    ) -> None:
        check_kernels(lr, foreach, fused)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "retract_every": retract_every,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, defaults, nonfinite)

    def _check_options(self, group: Group) -> None:
        check_range(group, lr=0, momentum=0, weight_decay=0)
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov needs momentum > 0 and dampening = 0, got {group['momentum']} and {group['dampening']}"
            )

    def _initialize(self, p: Tensor, state: dict[str, Any], group: Group) -> None:
        state["step"] = torch.tensor(0.0)
        state["momentum_buffer"] = torch.zeros_like(p)

    def _euclidean_step(self, group: Group, params: list[Tensor]) -> None:
        buffers = [self.state[p].get("momentum_buffer") for p in params]
        sgd(
            params,
            [p.grad for p in params if p.grad is not None],
            buffers,
            foreach=group["foreach"],
            fused=group["fused"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"] != 0:
            for p, buffer in zip(params, buffers, strict=True):
                self.state[p]["momentum_buffer"] = buffer

    def _riemannian_update(
        self, group: Group, manifold: geoopt.Manifold, points: Tensor, gradients: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        step, momentum = int(state["step"]), group["momentum"]
        ours = isinstance(manifold, Stiefel)
        direction = gradients if ours else manifold.egrad2rgrad(points, gradients)
        buffer = state["momentum_buffer"]
        # As in torch.optim.SGD, the first gradient enters the buffer undamped, and without momentum all do.
        damped = momentum != 0 and step > 1
        buffer.mul_(momentum).add_(direction, alpha=1 - (group["dampening"] if damped else 0))
        direction = direction + momentum * buffer if group["nesterov"] else buffer
        if isinstance(manifold, Stiefel):
            return manifold.move(points, -group["lr"] * direction, measure=step % group["retract_every"] == 0)
        moved, transported = manifold.retr_transp(points, -group["lr"] * direction, buffer)
        buffer.copy_(transported)
        return moved
