"""What the Riemannian optimizers share: finding manifolds, batching equal shapes, moving points."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from manifold_tying import linalg
from manifold_tying._geoopt import geoopt
from manifold_tying.manifolds import Stiefel, scaled_tangent_part, tangent_part
from manifold_tying.optim._finite import FiniteCheck, NonFinite, bounded
from manifold_tying.parametrizations import manifold_of

Group = dict[str, Any]


class RiemannianOptimizer(Optimizer):
    """An optimizer whose parameters may be points of manifolds; everything else it treats as torch.optim does.

    A parameter's manifold is that of its group (key "manifold", as ``param_groups`` makes them), else its own attribute
    ``manifold``, as ``geoopt.ManifoldParameter`` and ``manifold_tying.stiefel`` set it. Weight decay never acts on a point.

    A group may have a "scale", a tensor that every update of its parameters is multiplied by, entry by entry, as if each entry
    had a learning rate of its own; of points of Stiefel one number per column, see ``scaled_tangent_part``.

    Parameters may be DTensors, as FSDP2's are, on any mesh; the state is distributed as they are. A point sharded by rows takes
    two all-reduces of p x p per step, polar retraction only. All processes have to take every step.
    """

    follows_manifolds = True
    _first_moment: str  # its key in a point's state

    def __init__(self, params: Any, defaults: dict[str, Any], nonfinite: NonFinite) -> None:
        if nonfinite not in get_args(NonFinite):
            raise ValueError(f"unknown nonfinite {nonfinite!r}; choose one of {', '.join(get_args(NonFinite))}")
        self._manifolds: dict[Tensor, geoopt.Manifold] = {}
        self._marked: set[Tensor] = set()  # points by an attribute of theirs, which they may lose again
        self._versions: dict[Tensor, int] = {}  # of points after their last step, to see what others wrote
        self._names: dict[Tensor, str] = {}
        self._scales: dict[Tensor, Tensor] = {}
        self._finite = FiniteCheck(nonfinite)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """As in torch.optim, with three keys more: "manifold" and "scale" for all of its parameters, "names" for messages."""
        group = dict(param_group)
        manifold = group.pop("manifold", None)
        names = group.pop("names", None)
        scale = group.pop("scale", None)
        super().add_param_group(group)
        added = self.param_groups[-1]
        if names is not None and len(names) != len(added["params"]):
            self.param_groups.pop()
            raise ValueError(f"expected a name for each of {len(added['params'])} parameters, got {len(names)} names")
        try:
            self._check_options(added)
            for i, p in enumerate(added["params"]):
                name = (names or added.get("param_names") or {i: f"{i} of group {len(self.param_groups) - 1}"})[i]
                self._names[p] = name
                self._add_point(p, manifold or manifold_of(p), added)
                if scale is not None:
                    self._scales[p] = self._checked_scale(p, scale, name, added)
        except BaseException:  # the optimizer is as it was
            self.param_groups.pop()
            for p in added["params"]:
                for known in (self._names, self._manifolds, self._scales):
                    known.pop(p, None)
            raise

    def _add_point(self, p: Tensor, manifold: geoopt.Manifold | None, group: Group) -> None:
        if manifold is None or isinstance(manifold, geoopt.Euclidean):
            return
        label = f"on-manifold parameter {self._names[p]}"
        ok, reason = manifold.check_point(p, explain=True)
        if not ok:
            raise ValueError(
                f"{label} has a shape that is no point of {manifold}: {reason}. Was it flattened (FSDP1, ZeRO-3)? "
                "Use FSDP2, which keeps shapes"
            )
        if p.is_floating_point() and p.dtype.itemsize < 4:
            raise ValueError(f"{label} is {p.dtype}; keep points in float32 or wider and cast where they are used")
        if type(manifold) is Stiefel:
            manifold.check_placement(p, label)
        elif linalg.is_distributed(p):
            raise ValueError(
                f"{label} is distributed over processes, which works on Stiefel itself only, got {type(manifold).__name__}"
            )
        if not p.is_meta:
            ok, reason = manifold.check_point_on_manifold(p.detach(), atol=1e-3, rtol=1e-3, explain=True)
            if not ok:
                raise ValueError(
                    f"{label} is not on {manifold}: {reason}. Was it written in place, as nn.init does? Assign to the layer's "
                    "weight instead, which projects, or project it with manifold.projx"
                )
        if group.get("eps") == 0:
            raise ValueError(f"{label} needs eps > 0: where a gradient is zero, 0 / 0 would end on it")
        if group["retract_every"] != 1 and not is_polar(manifold):
            raise ValueError(f"retract_every > 1 works for Stiefel('polar') only, but {label} is on {manifold}")
        self._manifolds[p] = manifold
        self._versions[p] = p._version

    def _follow_constraints(self) -> None:
        """Follow parameters that were constrained, or lost their constraint, since they were added."""
        for group in self.param_groups:
            for p in group["params"]:
                manifold = manifold_of(p)
                if p not in self._manifolds:
                    if manifold is not None:
                        self.state.pop(p, None)
                        self._add_point(p, manifold, group)
                elif manifold is not None:
                    self._marked.add(p)
                elif p in self._marked:
                    self._marked.remove(p)
                    del self._manifolds[p]
                    self.state.pop(p, None)

    def _restore(self, p: Tensor) -> None:
        """Put a point back onto its manifold where something else, such as nn.init, wrote to it since its last step."""
        manifold = self._manifolds[p]
        if self._versions.get(p, p._version) != p._version and not manifold.check_point_on_manifold(
            p, atol=1e-3, rtol=1e-3
        ):
            p.copy_(manifold.projx(p))

    def _checked_scale(self, p: Tensor, scale: Tensor, name: str, group: Group) -> Tensor:
        scale = scale.detach().to(p.device, p.dtype)
        shape = p.shape[-1:] if p in self._manifolds else p.shape
        if scale.shape != shape or not (torch.isfinite(scale) & (scale >= 0)).all():
            raise ValueError(
                f"expected a scale of {name} with the shape {tuple(shape)} and finite numbers >= 0, got one of "
                f"{tuple(scale.shape)} from {scale.min().item():g} to {scale.max().item():g}"
            )
        if p in self._manifolds and not isinstance(self._manifolds[p], Stiefel):
            raise ValueError(f"a scale works for points of Stiefel only, but {name} is on {self._manifolds[p]}")
        if group["weight_decay"] != 0:
            raise ValueError(f"a scale goes with weight_decay=0 only, got {group['weight_decay']} for {name}")
        return scale if p in self._manifolds else linalg.local_like(scale, p)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update from the gradients; ``closure`` is run first, with gradients enabled, and its loss returned.

        ValueError that names the parameter, before anything is changed, where a gradient holds NaN or Inf. With
        ``nonfinite="skip"`` nothing is changed at all; with "ignore" only the gradients of points are looked at.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            self._follow_constraints()
        with torch.no_grad():
            if torch.compiler.is_compiling() or self._gradients_usable():
                for group in self.param_groups:
                    if not torch.compiler.is_compiling():  # a graph cannot depend on a count
                        group["steps_taken"] = group.get("steps_taken", 0) + 1
                    params = [p for p in group["params"] if p.grad is not None]
                    if ordinary := [p for p in params if p not in self._manifolds]:
                        self._scaled_euclidean_step(group, ordinary)
                    self._manifold_step(group, [p for p in params if p in self._manifolds])
        return loss

    def _scaled_euclidean_step(self, group: Group, params: list[Tensor]) -> None:
        """With a scale, the update is made of zeros and then added: it may be small beside the parameter."""
        parts = [
            torch.zeros_like(part) if p in self._scales else part
            for p, part in zip(params, local_parts(params), strict=True)
        ]
        self._euclidean_step(group, params, parts)
        for p, part in zip(params, parts, strict=True):
            if p in self._scales:
                linalg.local(p).addcmul_(self._scales[p], part)

    def _gradients_usable(self) -> bool:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        ahead = self._runs_ahead(params)
        if self._finite.nonfinite == "ignore":
            params = [p for p in params if p in self._manifolds]
        names = [self._names[p] for p in params]
        return self._finite.passes(names, local_gradients(params), ahead, linalg.process_total(params))

    def _manifold_step(self, group: Group, params: list[Tensor]) -> None:
        every = group["retract_every"]
        projects = every == 1 or torch.compiler.is_compiling() or group["steps_taken"] % every == 1
        batches: dict[Any, list[Tensor]] = defaultdict(list)
        for p in params:
            if not torch.compiler.is_compiling():
                self._restore(p)
            if not self.state[p]:
                self._initialize(p, self.state[p], group)
            where = (p.device_mesh, p.placements) if linalg.is_distributed(p) else p.device  # type: ignore[attr-defined]
            scale = self._scales.get(p)
            batches[
                same_motion(self._manifolds[p]), p.shape, p.dtype, where, id(scale) if scale is not None else 0
            ].append(p)
        for batch in batches.values():
            self._update_batch(group, self._manifolds[batch[0]], batch, projects)
        if not torch.compiler.is_compiling():
            self._versions |= {p: p._version for p in params}

    def _point_gradients(self, batch: list[Tensor]) -> list[Tensor]:
        gradients = local_gradients(batch)
        return [bounded(*pair) for pair in zip(gradients, batch, strict=True)] if self._finite.large else gradients

    def _update_batch(self, group: Group, manifold: geoopt.Manifold, batch: list[Tensor], projects: bool) -> None:
        """One update of points of the same shape on the same manifold, distributed alike, as one stack."""
        total = linalg.row_total(batch[0])
        points, gradients = stack(local_parts(batch)), stack(self._point_gradients(batch))
        states = [self.state[p] for p in batch]
        for state in states:
            state["step"] += 1
        keys = [key for key in states[0] if key != "step"]
        stacked = {key: stack([linalg.local(state[key]) for state in states]) for key in keys}
        real = points.real.dtype if points.is_complex() else points.dtype
        steps = torch.stack([state["step"] for state in states]).to(points.device, real)
        stacked["step"] = steps.view(-1, *[1] * (points.ndim - 1))
        if group["maximize"]:
            gradients = -gradients
        if projects:
            polar = is_polar(manifold)  # the only one that may lie on several processes
            gradients = tangent_part(total, points, gradients) if polar else manifold.egrad2rgrad(points, gradients)
        step = group["lr"] * self._direction(group, batch[0], points, gradients, stacked)
        if batch[0] in self._scales:
            step = scaled_tangent_part(total, points, step, self._scales[batch[0]])
        if is_polar(manifold):
            moved = linalg.reorthonormalize_(points - step, total)
        elif isinstance(manifold, Stiefel):
            moved = manifold.move(points, -step)
        else:
            moved, transported = manifold.retr_transp(points, -step, stacked[self._first_moment])
            stacked[self._first_moment].copy_(transported)
        for i, p in enumerate(local_parts(batch)):
            p.copy_(moved[i])
            for key in keys if len(batch) > 1 else ():
                linalg.local(states[i][key]).copy_(stacked[key][i])

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim; ValueError where a gradient of the last steps held NaN or Inf and none has said so yet."""
        self._finite.finish()
        return super().state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a loaded state as well: one of torch's own optimizer, which knows fewer options, or of another device."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch puts it there; it is no option of ours
        for group in self.param_groups:
            for option, default in self.defaults.items():
                group.setdefault(option, default)
            for p in group["params"]:
                if "step" in self.state.get(p, {}):
                    self.state[p]["step"] = self._step_count(p, self.state[p]["step"], group)

    def _step_count(self, p: Tensor, step: Tensor | float, group: Group) -> Tensor:
        """A loaded step count as a tensor where this optimizer has it; older torch and geoopt save a plain number."""
        if p in self._manifolds:
            return torch.as_tensor(step, dtype=torch.float32, device=p.device)
        if isinstance(step, Tensor):
            return step
        return torch.tensor(float(step), dtype=torch.float32, device=p.device if group["fused"] else "cpu")

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_manifolds": self._manifolds,
            "_marked": set(),  # the attributes do not travel with a tensor
            "_versions": {},
            "_names": self._names,
            "_scales": self._scales,
            "_finite": FiniteCheck(self._finite.nonfinite),
        }

    @abstractmethod
    def _check_options(self, group: Group) -> None:
        """ValueError unless the group's options are in range."""

    @abstractmethod
    def _initialize(self, p: Tensor, state: dict[str, Any], group: Group) -> None:
        """Allocate the state of an on-manifold parameter, "step" among it."""

    @abstractmethod
    def _euclidean_step(self, group: Group, params: list[Tensor], parts: list[Tensor]) -> None:
        """Update ``parts``, what this process has of ordinary parameters or zeros in their place, as torch.optim does."""

    @abstractmethod
    def _direction(
        self, group: Group, like: Tensor, points: Tensor, gradients: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        """What a step of length lr subtracts; updates ``state`` in place.

        All are the parts at hand with a leading batch dimension; ``like`` is one of the parameters that they are parts of.
        """

    def _runs_ahead(self, params: list[Tensor]) -> bool:
        """Whether the whole step can run on the device without the host waiting for it."""
        return False


def same_motion(manifold: geoopt.Manifold) -> Any:
    """A key that is equal for manifolds whose points move alike; of a foreign one only the object itself can tell."""
    return (manifold.retraction, manifold.terms) if type(manifold) is Stiefel else id(manifold)


def is_polar(manifold: geoopt.Manifold) -> bool:
    """Whether points move by the polar retraction of our Stiefel, for which a direction need not be tangent."""
    return type(manifold) is Stiefel and manifold.retraction == "polar"


def check_kernels(lr: float | Tensor, foreach: bool | None, fused: bool | None) -> None:
    """ValueError where torch.optim's kernels for ordinary parameters would refuse the combination at the first step."""
    if fused and (foreach or isinstance(lr, Tensor)):
        raise ValueError("fused=True goes with neither foreach=True nor a tensor lr; leave one of them out")


def check_range(group: Group, **minimum: float) -> None:
    """ValueError unless every named option of the group is a number >= its minimum."""
    for name, low in minimum.items():
        if isinstance(group[name], Tensor) and group[name].numel() != 1:
            shape = tuple(group[name].shape)
            raise ValueError(f"expected {name} to be a number or a one-element tensor, got a tensor of shape {shape}")
        if not group[name] >= low:
            raise ValueError(f"expected {name} >= {low:g}, got {group[name]}")
    linalg.check_whole("retract_every", group["retract_every"], 1)


def local_parts(params: Iterable[Tensor]) -> list[Tensor]:
    """What this process has of each parameter, to be updated in place."""
    return [linalg.local(p) for p in params]


def local_gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """What this process has of each gradient."""
    return [linalg.local(p.grad) for p in params if p.grad is not None]


def stack(tensors: Iterable[Tensor]) -> Tensor:
    tensors = list(tensors)
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
