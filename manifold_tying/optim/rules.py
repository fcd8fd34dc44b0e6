"""Arithmetic of the Riemannian optimizers, without groups and options.

X (..., n, p) are points of one shape on one manifold, G their gradients. If ranks share the rows of a point, X and G are this
rank's rows and ``reduce`` sums p x p matrices over those ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from manifold_tying import distributed, linalg, precision
from manifold_tying._geoopt import geoopt
from manifold_tying.manifolds import Sphere, Spheres, Stiefel, scaled_tangent_part, tangent_part

_LARGE, _BLOCK = 2**15, 2**17  # entries of a point on a sphere, and of a block of its rows
_PROBED, _OFF = 8, 1e-3  # columns of a point that are compared with all, and the largest deviation from orthonormal


class Batch(NamedTuple):
    """Points of one shape, dtype and placement on one manifold, updated by one call."""

    params: list[Tensor]
    manifold: geoopt.Manifold | Spheres
    gradients: list[Tensor]  # this rank's part of each
    states: list[dict[str, Any]]
    scale: Tensor | None
    project: bool

    @property
    def reduce(self) -> distributed.Reduce:
        return distributed.row_reduce(self.params[0])

    @property
    def can_project_written(self) -> bool:
        """Not where it would cost a collective, nor in compiled code."""
        return self.reduce is distributed.no_reduce and not torch.compiler.is_compiling()

    def local(self, key: str) -> list[Tensor]:
        """This rank's part of one state tensor of every point."""
        return [distributed.to_local(state[key]) for state in self.states]

    def split(self) -> "list[Batch]":
        """The batches to stack. A large point on a sphere is alone: it costs more to copy into a stack than to move."""
        if not isinstance(self.manifold, Spheres) or self.params[0].numel() <= _LARGE:
            return [self]
        spheres = [replace(self.manifold, radius=radius) for radius in self.manifold.radius.split(1)]
        points = zip(self.params, spheres, self.gradients, self.states, strict=True)
        return [Batch([p], sphere, [g], [state], self.scale, self.project) for p, sphere, g, state in points]


def is_polar(manifold: geoopt.Manifold | Spheres) -> bool:
    """Whether points move by the polar retraction of our Stiefel, which accepts directions that are not tangent."""
    return type(manifold) is Stiefel and manifold.retraction == "polar"


def manifold_key(manifold: geoopt.Manifold) -> Any:
    """Equal for manifolds whose points one call can update together; a foreign manifold has its own key."""
    if type(manifold) is Sphere:
        return manifold.of  # each with its own radius
    return (manifold.retraction, manifold.terms) if type(manifold) is Stiefel else id(manifold)


def project_written_(X: Tensor) -> None:
    """Project points on Stiefel that something else has written, also through ``.data``, which no version counter sees.

    A point counts as written if its first columns are not orthonormal to all. This takes a pass over X and a sync.
    """
    with precision.full_precision(X.device):
        first = X.mT @ X[..., :_PROBED]
    first.diagonal(dim1=-2, dim2=-1).sub_(1)
    if first.numel() and first.abs().amax() > _OFF:
        linalg.reorthonormalize_(X)


def retract(
    manifold: geoopt.Manifold | Spheres,
    X: Tensor,
    step: Tensor,
    reduce: distributed.Reduce,
    transported: Tensor,
    **options: Any,
) -> Tensor:
    """Move X along -step; on a foreign manifold also transport the moment ``transported``, in place."""
    if is_polar(manifold):
        return linalg.reorthonormalize_(X - step, reduce, **options)
    if isinstance(manifold, Stiefel):
        return manifold.move(X, -step)
    if isinstance(manifold, Spheres):
        moved: Tensor = X - step
        return torch.where(moved == 0, moved, manifold.projx(moved))  # a vector of zeros stays: it has no nearest point
    moved, moment = manifold.retr_transp(X, -step, transported)
    transported.copy_(moment)
    return moved


def adam_direction(
    R: Tensor, square: Tensor, m: Tensor, v: Tensor, step: Tensor, betas: tuple[float, float], eps: float
) -> Tensor:
    """m̂ / (√v̂ + eps) after m <- β₁m + (1 - β₁)R and v <- β₂v + (1 - β₂) square, both in place."""
    beta1, beta2 = betas
    m.lerp_(R, 1 - beta1)
    v.lerp_(square, 1 - beta2)
    return (m / (1 - beta1**step)).div_((v / (1 - beta2**step)).sqrt_().add_(eps))


def mean_square(R: Tensor, second_moment: str, entries: int, reduce: distributed.Reduce) -> Tensor:
    """Squares of R, or their mean by row or by matrix; a full matrix has ``entries`` entries over all ranks."""
    if second_moment == "matrix":
        return reduce(R.square().sum((-2, -1), keepdim=True)) / entries
    return R.square().mean(-1, keepdim=True) if second_moment == "row" else R.square()


def sgd_direction(R: Tensor, buffer: Tensor, step: Tensor, momentum: float, dampening: float, nesterov: bool) -> Tensor:
    """As in torch.optim.SGD: buffer <- momentum buffer + (1 - dampening) R, in place; the first R is not dampened."""
    damped = (step > 1).to(R.dtype) * dampening if momentum != 0 else 0.0
    buffer.mul_(momentum).add_((1 - damped) * R)
    return R + momentum * buffer if nesterov else buffer


# torch's fused kernel, for steps that are counted already; changes nothing if the option ``found_inf`` is 1. Called directly:
# the checks and sorting in ``torch.optim.adamw`` take longer than the step of a small point.
fused_adam_ = partial(torch._fused_adamw_, weight_decay=0.0, grad_scale=None, amsgrad=False)


def count_(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Count a step, unless ``found_inf`` is 1."""
    torch._foreach_add_(steps, 1 if found_inf is None else [1 - found_inf] * len(steps))


def riemannian_step_(
    batch: Batch,
    direction: Callable[..., Tensor],
    moment: str,
    *,
    lr: float | Tensor,
    maximize: bool,
    sync_free: bool = False,
    skip: Tensor | None = None,
) -> None:
    """R = grad f(X);  X <- retraction of X along -lr direction(batch, X, R, state), for the stacked points of a batch.

    ``direction`` updates the stacked state in place. On a foreign manifold the state's ``moment`` is transported. Steps with a
    ``skip`` of 1 do not count; gradients and lr are 0 then.
    """
    for part in batch.split():
        points, steps = [distributed.to_local(p) for p in part.params], part.local("step")
        X, G = _stack(points), _stack(part.gradients)
        count_(steps, skip)
        keys = [key for key in part.states[0] if key != "step"]
        state = {key: _stack(part.local(key)) for key in keys}
        real = X.real.dtype if X.is_complex() else X.dtype
        state["step"] = torch.stack(steps).to(X.device, real).view(-1, *[1] * (X.ndim - 1))
        if isinstance(part.manifold, Stiefel) and part.can_project_written and not sync_free:
            project_written_(X)
        if maximize:
            G = -G
        R = G
        if part.project:
            R = tangent_part(part.reduce, X, G) if is_polar(part.manifold) else part.manifold.egrad2rgrad(X, G)
        step = lr * direction(part, X, R, state)
        if part.scale is not None:
            step = scaled_tangent_part(part.reduce, X, step, part.scale)
        moved = retract(part.manifold, X, step, part.reduce, state[moment], sync_free=sync_free, skip=skip)
        for i, p in enumerate(points):
            p.copy_(moved[i])
            for key in keys if len(points) > 1 else ():  # the stack of one point is a view of its state
                distributed.to_local(part.states[i][key]).copy_(state[key][i])


def polar_adam_(batch: Batch, *, sync_free: bool, found_inf: Tensor | None, **options: Any) -> None:
    """R = G - X sym(XᵀG);  m, v <- moments of R;  Y = X - lr m̂ / (√v̂ + eps);  X <- Y (YᵀY)^(-1/2), all in place.

    For the polar retraction with one second moment per element. Large points run the projection and the kernel one block of
    rows at a time, which stays in the CPU cache.
    """
    count, reduce, steps = len(batch.params), batch.reduce, batch.local("step")
    points, gradients = [distributed.to_local(p) for p in batch.params], [g.contiguous() for g in batch.gradients]
    X, G = (points[0], gradients[0]) if count == 1 else (torch.stack(points), torch.stack(gradients))
    if not sync_free and batch.can_project_written:
        project_written_(X)
    A = reduce(X.mT @ G) if batch.project else None
    twice = None if A is None else A + A.mT
    blocks = precision.row_chunks(X)
    count_(steps, found_inf)
    for rows in blocks:
        x, R, *moments = (X, G, *batch.local("exp_avg"), *batch.local("exp_avg_sq"))
        if len(blocks) > 1:
            x, R, *moments = (t[..., rows, :] for t in (x, R, *moments))
        if twice is not None:
            R = torch.sub(R, x @ twice, alpha=0.5)
        xs, Rs = ([x], [R]) if count == 1 else (list(x), list(R))
        fused_adam_(xs, Rs, moments[:count], moments[count:], [], steps, found_inf=found_inf, **options)
    linalg.reorthonormalize_(X, reduce, sync_free=sync_free, skip=found_inf)
    if count > 1:
        torch._foreach_copy_(points, list(X))


def sphere_adam_(batch: Batch, *, found_inf: Tensor | None, **options: Any) -> None:
    """R = G - X <X, G> / radius²;  m, v <- moments of R;  Y = X - lr m̂ / (√v̂ + eps);  X <- Y normalized, all in place.

    One block of rows of a large matrix at a time, and one buffer: both stay in the CPU cache, which a new tensor is not in.
    """
    count_(batch.local("step"), found_inf)
    parts, like = batch.split(), distributed.to_local(batch.params[0])
    count, n = len(parts[0].params), like.shape[-2]
    height = max(1, _BLOCK // like.shape[-1]) if like.is_cpu and like.ndim == 2 and count == 1 else n
    scratch = like.new_empty(count, *like.shape[:-2], min(height, n), like.shape[-1])
    for part in parts:
        points, spheres = [distributed.to_local(p) for p in part.params], cast(Spheres, part.manifold)
        X, steps = _stack(points), part.local("step")
        tensors = X, _stack(part.gradients), *part.local("exp_avg"), *part.local("exp_avg_sq")
        blocks = [tensors] if height >= n else list(zip(*(t.split(height, -2) for t in tensors), strict=True))
        tasks = [(spheres, X, blocks)]
        if spheres.of == "rows" and len(blocks) > 1:  # each block has whole vectors
            radii = spheres.radius.split(height, -2)
            tasks = [(replace(spheres, radius=r), block[0], [block]) for r, block in zip(radii, blocks, strict=True)]
        for sphere, Y, of in tasks:
            xs, gs = [block[0] for block in of], [block[1] for block in of]
            normal = sphere.dot_of_blocks(xs, gs, scratch) / sphere.radius.square()
            for x, g, *moments in of:
                R = torch.addcmul(g, x, normal, value=-1, out=scratch[..., : x.shape[-2], :])
                moved, turned = x.unbind(), R.unbind()
                fused_adam_(moved, turned, moments[:count], moments[count:], [], steps, found_inf=found_inf, **options)
            sphere.normalize_(Y, sphere.dot_of_blocks(xs, xs, scratch), found_inf)
        if count > 1:
            torch._foreach_copy_(points, X.unbind())


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
