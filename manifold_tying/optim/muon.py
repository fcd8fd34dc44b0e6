"""Riemannian Muon: steepest descent in the spectral norm."""

from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import _muon as torch_muon
from torch.optim.optimizer import ParamsT

from manifold_tying import distributed, linalg, precision
from manifold_tying._geoopt import geoopt
from manifold_tying.manifolds import Sphere, Spheres, Stiefel
from manifold_tying.optim import rules
from manifold_tying.optim.adam import RiemannianAdam
from manifold_tying.optim.checks import Group, options_in
from manifold_tying.optim.nonfinite import NonFinite

AdjustLr = Literal["match_rms_adamw", "original"]
_NEWTON_SCHULZ = (
    (torch_muon.DEFAULT_A, torch_muon.DEFAULT_B, torch_muon.DEFAULT_C), torch_muon.DEFAULT_NS_STEPS, torch_muon.EPS
)  # fmt: skip


class RiemannianMuon(RiemannianAdam):
    """Muon for points on Stiefel and on spheres; bit for bit torch.optim.Muon for ordinary matrices, AdamW for the rest.

    With R the Riemannian gradient and U = R + μ(M - R), M <- M + (1 - μ)(R - M) its averages, as Muon's momentum:

        Stiefel   X⁺ = retraction of X - lr D, D = msign(P(U)), P the projection to the tangent space: the singular values of
                  the step are lr. ``dual_steps`` > 0 makes D the tangent direction of spectral norm 1 with the largest
                  slope, to a precision that grows with the steps (SPEL, arXiv 2601.21487, projects the gradient only).
        Sphere    X⁺ = radius (X - lr D) / ‖X - lr D‖, D = P(msign(U)) with the norm of the radius: each row, column or matrix
                  turns by atan(lr) (Hyperball, arXiv 2606.16899, does not project).
        matrices  torch.optim.Muon, its rate times ``adjust_lr_fn``; DTensors are gathered for the direction.

    All else is moved as by :class:`RiemannianAdam`: vectors, other shapes, tensors behind a parametrization, points on other
    manifolds, and groups with ``use_muon=False``, as :func:`param_groups` sets for tables and heads.

    Args:
        params: tensors, (name, tensor) pairs or groups; see ``param_groups``.
        lr: learning rate, a float or a one-element tensor. For points it is an angle, so that they want another than AdamW.
        momentum: decay rate of the average of gradients, μ.
        betas: as in :class:`RiemannianAdam`, for what AdamW moves.
        eps: as betas.
        weight_decay: decoupled; never applied to points.
        use_muon: whether Muon moves the matrices and points of a group.
        nesterov: as in torch.optim.Muon; False takes D from M.
        dual_steps: steps for the tangent direction; four take 1.4 to 4.2 times as long as none.
        adjust_lr_fn: as in torch.optim.Muon, for ordinary matrices: "match_rms_adamw" fits AdamW's learning rates,
            "original" is torch's default.
        maximize: maximize the objective.
        foreach: as in torch.optim.AdamW, for what it moves.
        fused: as foreach; on one GPU steps then run without a sync, as in :class:`RiemannianAdam`.
        nonfinite: as in :class:`RiemannianAdam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        use_muon: bool = True,
        nesterov: bool = True,
        dual_steps: int = 0,
        adjust_lr_fn: AdjustLr = "match_rms_adamw",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        nonfinite: NonFinite = "raise",
    ) -> None:
        defaults = {**options_in(locals()), "second_moment": "element", "project_every": 1}  # of Adam, for the rest
        super(RiemannianAdam, self).__init__(params, defaults, nonfinite)

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        precision.check_int("dual_steps", group["dual_steps"], 0)
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"expected momentum in [0, 1), got {group['momentum']}")
        precision.check_choice("adjust_lr_fn", group["adjust_lr_fn"], AdjustLr)

    def _by_muon(self, group: Group, p: Tensor) -> bool:
        manifold = self._manifolds.get(p)
        ordinary = manifold is None and p.ndim == 2 and self._homes.get(p) is None and not p.is_complex()
        return group["use_muon"] and (ordinary or isinstance(manifold, Stiefel | Sphere))

    def _gradients_usable(self) -> bool:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p)
                if state and self._by_muon(group, p) != ("momentum_buffer" in state):
                    raise ValueError(
                        f"use_muon was changed after the first step of parameter {self._names[p]}, whose state has "
                        f"{', '.join(state)}. Make a new optimizer, or change it back"
                    )
        return super()._gradients_usable()

    def _new_state(self, p: Tensor, manifold: geoopt.Manifold, group: Group) -> dict[str, Any]:
        state = super()._new_state(p, manifold, group)
        return {"step": state["step"], "momentum_buffer": state["exp_avg"]} if self._by_muon(group, p) else state

    def state_shapes(self, group: Group, p: Tensor) -> dict[str, torch.Size]:
        """Global shape of each state tensor that a parameter of this group has after its first step."""
        ordinary = p not in self._manifolds and self._by_muon(group, p)
        return {"momentum_buffer": p.shape} if ordinary else super().state_shapes(group, p)

    def _step_ordinary(self, group: Group, params: list[Tensor], parts: list[Tensor]) -> None:
        pairs = list(zip(params, parts, strict=True))
        if rest := [pair for pair in pairs if not self._by_muon(group, pair[0])]:
            super()._step_ordinary(group, *map(list, zip(*rest, strict=True)))
        lr, keep = group["lr"], self._keep()
        for p, part in pairs:
            if p.grad is None or not self._by_muon(group, p):
                continue
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            G = self._usable(distributed.to_local(p.grad))
            buffer = distributed.to_local(self.state[p]["momentum_buffer"])
            U = _averaged(group, buffer, -G if group["maximize"] else G, keep)
            whole = distributed.full_tensor(distributed.from_local_like(p, U))
            D = torch_muon._zeropower_via_newtonschulz(whole.to(torch.bfloat16, copy=True), *_NEWTON_SCHULZ)
            D = distributed.shard_like(D, p)
            part.mul_(1 - lr * keep * group["weight_decay"])
            rate = torch_muon._adjust_lr(lr, group["adjust_lr_fn"], p.shape) * keep
            if isinstance(rate, Tensor):
                part.sub_(rate.to(part) * D.to(part))
            else:
                part.add_(D, alpha=-rate)

    def _step_points(self, group: Group, batch: rules.Batch) -> None:
        if not self._by_muon(group, batch.params[0]):
            return super()._step_points(group, batch)
        gradients = [self._usable(gradient) for gradient in batch.gradients]
        with precision.disable_autocast(batch.params[0].device):
            rules.riemannian_step_(
                batch._replace(gradients=gradients),
                partial(self._spectral_direction, group),
                "momentum_buffer",
                lr=group["lr"] * self._keep(),
                maximize=group["maximize"],
                sync_free=self._runs_sync_free(group),
                skip=self._guard.found_inf,
            )

    def _spectral_direction(
        self, group: Group, batch: rules.Batch, X: Tensor, R: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        U = _averaged(group, state["momentum_buffer"], R, self._keep())
        if isinstance(batch.manifold, Stiefel):
            return linalg.tangent_msign(X, U, group["dual_steps"], batch.reduce)
        return cast(Spheres, batch.manifold).scaled_tangent(X, linalg.msign(U, batch.reduce))

    def _fits_kernel(self, group: Group, p: Tensor) -> bool:
        if not self._by_muon(group, p):
            return super()._fits_kernel(group, p)
        return rules.is_polar(self._manifolds[p]) or type(self._manifolds[p]) is Sphere

    def _keep(self) -> float | Tensor:
        """0 if a gradient of this step is not finite and the host does not know it yet, otherwise 1."""
        return 1.0 if self._guard.found_inf is None else 1 - self._guard.found_inf

    def _usable(self, gradient: Tensor) -> Tensor:
        found_inf = self._guard.found_inf
        return gradient if found_inf is None else torch.where(found_inf > 0, 0, gradient)


def _averaged(group: Group, buffer: Tensor, R: Tensor, keep: float | Tensor) -> Tensor:
    """Update the average of gradients in place and return Muon's momentum."""
    weight = (1 - group["momentum"]) * keep
    buffer.lerp_(R, weight.to(buffer.dtype) if isinstance(weight, Tensor) else weight)
    return R.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
