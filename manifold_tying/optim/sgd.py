"""Riemannian stochastic gradient descent."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from manifold_tying import distributed
from manifold_tying._geoopt import geoopt
from manifold_tying.optim import rules
from manifold_tying.optim.checks import Group, check_range, options_in
from manifold_tying.optim.nonfinite import NonFinite
from manifold_tying.optim.optimizer import RiemannianOptimizer, local_gradients


class RiemannianSGD(RiemannianOptimizer):
    """SGD with momentum for points on manifolds; bit for bit torch.optim.SGD for all other parameters.

    The momentum averages Riemannian gradients. On our :class:`~manifold_tying.Stiefel` and :class:`~manifold_tying.Sphere` it
    lives in the ambient space, without transport. On any other geoopt manifold it is transported, as in geoopt. It starts as
    the first Riemannian gradient, in geoopt as the first Euclidean one.

    Args:
        params: tensors, (name, tensor) pairs or groups; see ``param_groups``.
        lr: learning rate, a float or a one-element tensor.
        momentum: as in torch.optim.SGD.
        dampening: as in torch.optim.SGD.
        weight_decay: L2 penalty; never applied to points.
        nesterov: as in torch.optim.SGD.
        project_every: as in :class:`RiemannianAdam`.
        maximize: maximize the objective.
        foreach: as in torch.optim.SGD.
        fused: as in torch.optim.SGD.
        nonfinite: as in :class:`RiemannianAdam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        project_every: int = 1,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        nonfinite: NonFinite = "raise",
    ) -> None:
        super().__init__(params, options_in(locals()), nonfinite)

    def _check_options(self, group: Group) -> None:
        check_range(group, lr=0, momentum=0, weight_decay=0)
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov needs momentum > 0 and dampening = 0, got {group['momentum']} and {group['dampening']}"
            )

    def _new_state(self, p: Tensor, manifold: geoopt.Manifold, group: Group) -> dict[str, Any]:
        return {"step": torch.zeros((), dtype=torch.float32, device=p.device), "momentum_buffer": torch.zeros_like(p)}

    def _step_ordinary(self, group: Group, params: list[Tensor], parts: list[Tensor]) -> None:
        found = [self.state[p].get("momentum_buffer") for p in params]
        buffers = [None if buffer is None else distributed.to_local(buffer) for buffer in found]
        options = "foreach", "fused", "weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize"
        sgd(parts, local_gradients(params), buffers, **{name: group[name] for name in options})
        if group["momentum"] != 0:
            for p, before, buffer in zip(params, found, buffers, strict=True):
                if before is None:
                    assert buffer is not None, "sgd made it"
                    self.state[p]["momentum_buffer"] = distributed.from_local_like(p, buffer)

    def _step_points(self, group: Group, batch: rules.Batch) -> None:
        def direction(_: rules.Batch, X: Tensor, R: Tensor, state: dict[str, Tensor]) -> Tensor:
            options = group["momentum"], group["dampening"], group["nesterov"]
            return rules.sgd_direction(R, state["momentum_buffer"], state["step"], *options)

        rules.riemannian_step_(batch, direction, "momentum_buffer", lr=group["lr"], maximize=group["maximize"])
