"""Riemannian Adam."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from manifold_tying import distributed, precision
from manifold_tying._geoopt import geoopt
from manifold_tying.manifolds import Sphere, Spheres, Stiefel
from manifold_tying.optim import rules
from manifold_tying.optim.checks import Group, check_range, options_in
from manifold_tying.optim.nonfinite import NonFinite, is_captured
from manifold_tying.optim.optimizer import RiemannianOptimizer, local_gradients

SecondMoment = Literal["element", "row", "matrix"]
SYNC_FREE_DEVICES = ("cuda",)
# In sync-free mode, sync every so many steps to check that the fixed number of iterations still converges.
SYNC_EVERY = 100
# The fixed number of iterations costs 6 to 9 extra p x p products; above this width a sync is cheaper.
SYNC_FREE_MAX_COLUMNS = 1024


class RiemannianAdam(RiemannianOptimizer):
    """Adam for points on manifolds; bit for bit torch.optim.AdamW for all other parameters.

    On our :class:`~manifold_tying.Stiefel` with the polar retraction, a step of X (n x p) along gradient G is

        R = G - X sym(XᵀG),  m and v: Adam's moments of R,  Y = X - lr m̂ / (√v̂ + eps),  X⁺ = Y (YᵀY)^(-1/2).

    This costs four matmuls of 2np² operations (YᵀY takes 5/8 of one) and torch's fused Adam kernel, in place, one block of
    rows at a time. XᵀG and X sym(XᵀG) follow ``torch.set_float32_matmul_precision`` (TF32 on a GPU); the point and YᵀY are
    always float32.

    The gradient is projected before the moments see it: its normal part does not vanish at an optimum, and the element-wise
    division would turn some of it into motion (docs/learning-rates.md has the numbers). The direction need not be projected,
    since X⁺ is the nearest point to Y; the other retractions project it, too. A step on our :class:`~manifold_tying.Sphere` is
    the same with its projection and its nearest point. On any other geoopt manifold this is geoopt's
    RiemannianAdam: moments of the Riemannian gradient, the first one transported (Bécigneul and Ganea 2019).

    With ``fused=True`` on one GPU steps run without a sync, except every hundredth, which checks that the fixed number of
    iterations still converges. This needs the polar retraction, second_moment="element" and at most 1024 columns (wider points
    are faster with the sync). A NaN or Inf gradient masks the update on the device and is reported at one of the next steps.
    After such a step ``torch.cuda.graph`` can capture the next; an lr that is to change must be a tensor on the GPU. Replays
    mask without a report. ``torch.compile(optimizer.step, fullgraph=True)`` works with a tensor lr and does not check for NaN.
    Neither notices changed constraints, and both project every gradient.

    Args:
        params: tensors, (name, tensor) pairs or groups; see ``param_groups``.
        lr: learning rate, a float or a one-element tensor.
        betas: decay rates of the two moments, as in Adam.
        eps: added to the root of the second moment, as in Adam.
        weight_decay: decoupled; never applied to points. AdamW's default is 0.01.
        second_moment: on Stiefel and Sphere, one second moment per "element", per "row" or per "matrix" (mean of squares).
            "row" and "matrix" make the trajectory independent of the basis of the columns.
        project_every: project the gradient at every n-th step of a point only, which saves two of the four matmuls at the
            others. The point is retracted at every step, but where it settles is not quite stationary. Polar retraction only.
        maximize: maximize the objective.
        foreach: as in torch.optim.AdamW, for ordinary parameters.
        fused: as in torch.optim.AdamW, for ordinary parameters.
        nonfinite: what to do with a NaN or Inf gradient: "raise" a ValueError, "skip" the step, or "ignore" it in ordinary
            parameters, which become NaN as in torch.optim (points still raise). "ignore" saves one pass over the gradients,
            for loops that check them anyway; without a check one NaN silently turns the model to NaN at the next step. In
            sync-free mode, ``state_dict`` reports a NaN of the last steps.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        second_moment: SecondMoment = "element",
        project_every: int = 1,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        nonfinite: NonFinite = "raise",
    ) -> None:
        super().__init__(params, options_in(locals()), nonfinite)

    def _check_options(self, group: Group) -> None:
        check_range(group, lr=0, eps=0, weight_decay=0)
        if group["foreach"] and isinstance(group["lr"], Tensor):
            raise ValueError("foreach=True does not support a tensor lr; drop one of them")
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"expected betas to be two numbers in [0, 1), got {group['betas']}")
        precision.check_choice("second_moment", group["second_moment"], SecondMoment)

    def _new_state(self, p: Tensor, manifold: geoopt.Manifold, group: Group) -> dict[str, Any]:
        ours = isinstance(manifold, Stiefel | Sphere)
        second = _second_moment(p, group) if ours else manifold.component_inner(p, p)
        return {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(second),
        }

    def state_shapes(self, group: Group, p: Tensor) -> dict[str, torch.Size]:
        """Global shape of each state tensor that a parameter of this group has after its first step."""
        return super().state_shapes(group, p) or {"step": torch.Size(), "exp_avg": p.shape, "exp_avg_sq": p.shape}

    def _step_ordinary(self, group: Group, params: list[Tensor], parts: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p].update(
                    step=torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu"),
                    exp_avg=torch.zeros_like(p, memory_format=torch.preserve_format),
                    exp_avg_sq=torch.zeros_like(p, memory_format=torch.preserve_format),
                )
        states = [self.state[p] for p in params]
        fused = None if torch.compiler.is_compiling() else group["fused"]  # torch traces no fused optimizer
        adamw(
            parts,
            local_gradients(params),
            [distributed.to_local(state["exp_avg"]) for state in states],
            [distributed.to_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=None if group["fused"] else group["foreach"], fused=fused, found_inf=self._guard.found_inf,
            has_complex=any(p.is_complex() for p in parts), weight_decay=group["weight_decay"], amsgrad=False,
            **_kernel_options(group, fused=False),
        )  # fmt: skip

    def _step_points(self, group: Group, batch: rules.Batch) -> None:
        if not torch.compiler.is_compiling() and all(self._fits_kernel(group, p) for p in batch.params):
            # The projection follows the user's float32 precision setting: it affects the direction, not the point.
            with precision.disable_autocast(batch.params[0].device):
                options = {"found_inf": self._guard.found_inf, **_kernel_options(group, fused=True)}
                if isinstance(batch.manifold, Stiefel):
                    rules.polar_adam_(batch, sync_free=self._runs_sync_free(group), **options)
                else:
                    rules.sphere_adam_(batch, **options)
            return
        direction = partial(self._direction, group)
        rules.riemannian_step_(batch, direction, "exp_avg", lr=group["lr"], maximize=group["maximize"])

    def _direction(self, group: Group, batch: rules.Batch, X: Tensor, R: Tensor, state: dict[str, Tensor]) -> Tensor:
        if isinstance(batch.manifold, Stiefel | Spheres):
            square = rules.mean_square(R, group["second_moment"], batch.params[0].shape[-2:].numel(), batch.reduce)
        else:
            square = batch.manifold.component_inner(X, R)
        moments = state["exp_avg"], state["exp_avg_sq"], state["step"]
        return rules.adam_direction(R, square, *moments, group["betas"], group["eps"])

    def _runs_sync_free(self, group: Group) -> bool:
        return self._guard.found_inf is not None and (group["steps_taken"] % SYNC_EVERY != 0 or is_captured())

    def _fits_kernel(self, group: Group, p: Tensor) -> bool:
        """Whether one of the rules by torch's fused kernel can update p (required for masking on the device)."""
        kernel = p.device.type in ("cpu", "cuda") and distributed.to_local(p).is_contiguous()
        manifold = self._manifolds[p]
        usual = (rules.is_polar(manifold) and p not in self._scales) or type(manifold) is Sphere
        return usual and kernel and group["second_moment"] == "element"

    def _sync_free(self, params: list[Tensor]) -> bool:
        if not (params and params[0].device.type in SYNC_FREE_DEVICES and all(g["fused"] for g in self.param_groups)):
            return False
        points = [(group, p) for group in self.param_groups for p in group["params"] if p in self._manifolds]
        narrow = all(p.shape[-1] <= SYNC_FREE_MAX_COLUMNS for _, p in points if type(self._manifolds[p]) is not Sphere)
        return narrow and len({p.device for p in params}) == 1 and all(self._fits_kernel(*pair) for pair in points)


def _kernel_options(group: Group, *, fused: bool) -> dict[str, Any]:
    (beta1, beta2), lr = group["betas"], group["lr"]
    if fused and isinstance(lr, Tensor) and lr.device.type == "cpu":
        lr = lr.item()  # the fused kernel rejects CPU tensors
    return {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": group["eps"], "maximize": group["maximize"]}


def _second_moment(p: Tensor, group: Group) -> Tensor:
    """A tensor with the shape and placement of the second moment of a point on Stiefel."""
    if group["second_moment"] == "element":
        return p
    if group["second_moment"] == "row":
        return p[..., :1]
    if distributed.row_reduce(p) is distributed.no_reduce:
        return p[..., :1, :1]  # same placement as the matrices
    return distributed.to_local(p).new_empty(*distributed.to_local(p).shape[:-2], 1, 1)
