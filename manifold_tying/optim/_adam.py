"""Riemannian Adam."""

from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying._geoopt import geoopt
from manifold_tying.manifolds import Stiefel
from manifold_tying.optim._base import (
    Group,
    RiemannianOptimizer,
    check_kernels,
    check_range,
    is_polar,
    local_gradients,
    local_parts,
)
from manifold_tying.optim._finite import NonFinite
from manifold_tying.optim._kernels import adamw_, fused_adamw_

SecondMoment = Literal["element", "row", "matrix"]
# Where the host does not wait for the device, every so many steps it does, to look whether the products still suffice.
EXACT_EVERY = 100
# A fixed number of products costs 8 of 2p³ more than a look at the data: more than the wait, where p is large.
WIDEST_AHEAD = 2048


class RiemannianAdam(RiemannianOptimizer):
    """Adam for points of manifolds, and bit for bit torch.optim.AdamW for all other parameters.

    On our :class:`~manifold_tying.Stiefel` with the polar retraction, a step of X (n x p) along gradient G is

        R = G - X sym(XᵀG),  m and v: Adam's moments of R,  Y = X - lr m̂ / (√v̂ + eps),  X⁺ = Y (YᵀY)^(-1/2),

    four products of 2np² operations, of which YᵀY takes 5/8, and torch's fused Adam kernel, in place and a block of rows at a
    time. XᵀG and X sym(XᵀG) follow ``torch.set_float32_matmul_precision``, TF32 on a GPU; the point and YᵀY stay float32
    whatever it is. The gradient has to be projected before the moments see it: its normal part does not vanish at an optimum,
    and the element-wise division turns some of it into motion (docs/learning-rates.md has the numbers); the direction need
    not be, since X⁺ is the nearest point to Y. With the other retractions the direction is projected, too. On any other
    geoopt manifold it is geoopt's RiemannianAdam: moments of the Riemannian gradient, the first one transported (Bécigneul
    and Ganea 2019).

    On one GPU with ``fused=True`` a step never waits for the device (points by polar retraction with second_moment="element",
    and at most 2048 columns: wider ones are faster with the wait). Then a gradient with NaN or Inf masks the update on the
    device and is reported at one of the next steps, and each hundredth step looks whether the fixed number of products still
    suffices. ``torch.compile(optimizer.step, fullgraph=True)`` works with a tensor lr, which can change without recompilation;
    compiled steps do not look for NaN and project every gradient.

    Args:
        params: tensors, (name, tensor) pairs or groups; see ``param_groups``.
        lr: learning rate, a float or a one-element tensor.
        betas, eps: as in Adam.
        weight_decay: decoupled, for ordinary parameters only: it never acts on a point.
        second_moment: on Stiefel, one second moment per "element", per "row" or per "matrix" (mean of squares). The latter
            two make the trajectory independent of the basis of the columns.
        retract_every: n projects the gradient at every n-th step only, which saves two products of four at the others. The
            point is retracted at every step. Polar retraction only. Costs accuracy: docs/learning-rates.md.
        maximize: ascend.
        foreach, fused: as in torch.optim.AdamW, for ordinary parameters.
        nonfinite: "raise" a ValueError on a NaN or Inf gradient, or "skip" that step. "ignore" raises for points only: ordinary
            parameters become NaN, as in torch.optim. It saves one pass over their gradients, for loops that check them before.
            They are looked at by default, since one NaN in a body makes the whole model NaN at the next step, in silence. A
            NaN of the last steps that ran ahead on a GPU is reported by ``state_dict``.
    """

    _first_moment = "exp_avg"
    _ahead_on = ("cuda",)

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
        state["step"] = torch.zeros((), device=p.device)
        state["exp_avg"] = torch.zeros_like(p)
        manifold = self._manifolds[p]
        if isinstance(manifold, Stiefel):
            state["exp_avg_sq"] = _zero_second_moment(p, group["second_moment"])
        else:
            state["exp_avg_sq"] = torch.zeros_like(manifold.component_inner(p, p))

    def state_shapes(self, group: Group, p: Tensor) -> dict[str, torch.Size]:
        """Shape of each tensor that the state of a parameter of this group has after its first step, over all processes."""
        second = p.shape
        if isinstance(self._manifolds.get(p), Stiefel) and group["second_moment"] != "element":
            second = p[..., :1].shape if group["second_moment"] == "row" else p[..., :1, :1].shape
        elif p in self._manifolds and not isinstance(self._manifolds[p], Stiefel):
            second = self._manifolds[p].component_inner(p, p).shape
        return {"step": torch.Size(), "exp_avg": p.shape, "exp_avg_sq": second}

    def _euclidean_step(self, group: Group, params: list[Tensor], parts: list[Tensor]) -> None:
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), device=p.device if group["fused"] else "cpu")
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        states = [self.state[p] for p in params]
        adamw_(
            group,
            parts,
            local_gradients(params),
            local_parts(state["exp_avg"] for state in states),
            local_parts(state["exp_avg_sq"] for state in states),
            [state["step"] for state in states],
            self._finite.found_inf,
        )

    def _update_batch(self, group: Group, manifold: geoopt.Manifold, batch: list[Tensor], projects: bool) -> None:
        """The usual case in place, a block of rows at a time, with torch's fused kernel for what is element-wise."""
        if torch.compiler.is_compiling() or not all(self._moves_in_place(group, p) for p in batch):
            super()._update_batch(group, manifold, batch, projects)
            return
        # The projection in whatever float32 precision is set, since it decides a direction and not the point.
        device = batch[0].device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            self._update_in_place(group, batch, projects)

    def _moves_in_place(self, group: Group, p: Tensor) -> bool:
        """Whether a point is a usual case, the only one that a masked step leaves alone."""
        kernel = p.device.type in ("cpu", "cuda") and linalg.local(p).is_contiguous()
        usual = is_polar(self._manifolds[p]) and group["second_moment"] == "element" and p not in self._scales
        return usual and kernel

    def _update_in_place(self, group: Group, batch: list[Tensor], projects: bool) -> None:
        alone, total = len(batch) == 1, linalg.row_total(batch[0])
        points, gradients = local_parts(batch), [g.contiguous() for g in self._point_gradients(batch)]
        X, G = (points[0], gradients[0]) if alone else (torch.stack(points), torch.stack(gradients))
        states, found_inf = [self.state[p] for p in batch], self._finite.found_inf
        exp_avgs = local_parts(state["exp_avg"] for state in states)
        exp_avg_sqs = local_parts(state["exp_avg_sq"] for state in states)
        A = total(X.mT @ G) if projects else None
        twice = None if A is None else A + A.mT
        blocks = linalg.row_blocks(X)
        single = len(blocks) == 1
        buffer = None if single else torch.empty_like(X[..., blocks[0], :])
        for rows in blocks:
            part, gradient, *moments = [t if single else t[..., rows, :] for t in (X, G, *exp_avgs, *exp_avg_sqs)]
            if twice is not None:
                out = None if buffer is None else buffer[..., : part.shape[-2], :]
                product = torch.matmul(part, twice, out=out)
                gradient = torch.sub(gradient, product, alpha=0.5, out=product)
            # the kernel's own count, unless it is masked: for all blocks at the last one
            steps = [state["step"] if rows is blocks[-1] else state["step"].clone() for state in states]
            fused_adamw_(
                group,
                [part] if alone else list(part),
                [gradient] if alone else list(gradient),
                moments[: len(batch)],
                moments[len(batch) :],
                steps,
                found_inf,
            )
        ahead = found_inf is not None and group["steps_taken"] % EXACT_EVERY != 0
        linalg.reorthonormalize_(X, total, fixed=ahead, keep=found_inf)
        if not alone:
            torch._foreach_copy_(points, list(X))

    def _direction(
        self, group: Group, like: Tensor, points: Tensor, gradients: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        """m̂ / (√v̂ + eps) after updating the moments m = ``exp_avg`` and v = ``exp_avg_sq``."""
        (beta1, beta2), step = group["betas"], state["step"]
        manifold = self._manifolds[like]
        square = (
            _mean_square(gradients, group["second_moment"], like)
            if isinstance(manifold, Stiefel)
            else manifold.component_inner(points, gradients)
        )
        state["exp_avg"].lerp_(gradients, 1 - beta1)
        state["exp_avg_sq"].lerp_(square, 1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / (1 - beta1**step)).div_(denominator)

    def _runs_ahead(self, params: list[Tensor]) -> bool:
        if not (params and params[0].device.type in self._ahead_on and all(g["fused"] for g in self.param_groups)):
            return False
        points = [(group, p) for group in self.param_groups for p in group["params"] if p in self._manifolds]
        return len({p.device for p in params}) == 1 and all(
            self._moves_in_place(group, p) and p.shape[-1] <= WIDEST_AHEAD for group, p in points
        )


def _mean_square(x: Tensor, second_moment: str, like: Tensor) -> Tensor:
    """Of the part x of a matrix of ``like``'s shape, distributed as it is."""
    if second_moment == "matrix":
        return linalg.row_total(like)(x.square().sum((-2, -1), keepdim=True)) / like.shape[-2:].numel()
    return x.square().mean(-1, keepdim=True) if second_moment == "row" else x.square()


def _zero_second_moment(p: Tensor, second_moment: str) -> Tensor:
    if second_moment == "element":
        return torch.zeros_like(p)
    if second_moment == "row":
        return torch.zeros_like(p[..., :1])
    if linalg.row_total(p) is linalg.nothing_to_add:  # distributed as the matrices are, where they are whole
        return torch.zeros_like(p[..., :1, :1])
    return linalg.local(p).new_zeros(*linalg.local(p).shape[:-2], 1, 1)
