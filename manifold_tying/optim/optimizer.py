"""Base class of the Riemannian optimizers: parameter groups, manifolds, state, and batches of points updated together."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from manifold_tying import distributed, precision
from manifold_tying._geoopt import geoopt
from manifold_tying.manifolds import Sphere, Spheres, Stiefel
from manifold_tying.optim.checks import Group, check_point, check_width, checked_scale
from manifold_tying.optim.nonfinite import NonFinite, NonFiniteGuard, is_captured, rescale_to_range
from manifold_tying.optim.rules import Batch, manifold_key
from manifold_tying.parametrizations import home_of, homes, is_removed, manifold_of

T = TypeVar("T")


class RiemannianOptimizer(Optimizer):
    """Optimizer whose parameters may be points on manifolds; all others are treated as in torch.optim.

    A parameter's manifold is that of its group (key "manifold", set by ``param_groups``), otherwise its own attribute
    ``manifold``, set by ``geoopt.ManifoldParameter`` and ``manifold_tying.stiefel``. Weight decay never acts on a point.

    A group may have a "scale": a learning-rate multiplier per entry, or per column for points on Stiefel (see
    ``scaled_tangent_part``).

    Parameters may be DTensors on any mesh, as in FSDP2; the state has the same placement. A point sharded by rows takes two
    all-reduces of p x p per step (polar retraction only). All ranks must take every step.
    """

    follows_manifolds = True

    def __init__(self, params: ParamsT, defaults: dict[str, Any], nonfinite: NonFinite) -> None:
        precision.check_choice("nonfinite", nonfinite, NonFinite)
        if defaults["fused"] and defaults["foreach"]:  # torch's kernels would refuse at the first step
            raise ValueError("fused=True does not support foreach=True; drop one of them")
        self._manifolds: dict[Tensor, geoopt.Manifold] = {}
        self._homes: dict[Tensor, nn.Module | None] = {}
        self._versions: dict[Tensor, int] = {}  # version counters after the last step, to detect writes by others
        self._updates: dict[Tensor, int] = {}  # of points whose gradient is not projected at every one
        self._names: dict[Tensor, str] = {}
        self._scales: dict[Tensor, Tensor] = {}
        self._guard = NonFiniteGuard(nonfinite)
        super().__init__(params, defaults)

    @abstractmethod
    def _check_options(self, group: Group) -> None:
        """ValueError unless the group's options are in range."""

    @abstractmethod
    def _new_state(self, p: Tensor, manifold: geoopt.Manifold, group: Group) -> dict[str, Any]:
        """The state of a point before its first step, "step" among it."""

    @abstractmethod
    def _step_ordinary(self, group: Group, params: list[Tensor], parts: list[Tensor]) -> None:
        """Update ``parts`` as torch.optim does: this rank's parts of ordinary parameters, or zeros in their place."""

    @abstractmethod
    def _step_points(self, group: Group, batch: Batch) -> None:
        """Update the points of a batch and their state."""

    def _sync_free(self, params: list[Tensor]) -> bool:
        """Whether the step can run without a sync."""
        return False

    def add_param_group(self, param_group: Group) -> None:
        """As in torch.optim, with three more keys: "manifold" and "scale" for all its parameters, "names" for messages."""
        group = dict(param_group)
        manifold = group.pop("manifold", None)
        names = group.pop("names", None)
        scale = group.pop("scale", None)
        super().add_param_group(group)
        added = self.param_groups[-1]
        if names is not None and len(names) != len(added["params"]):
            self.param_groups.pop()
            raise ValueError(f"expected a name for each of {len(added['params'])} parameters, got {len(names)} names")
        known = homes()
        try:
            self._check_options(added)
            for i, p in enumerate(added["params"]):
                name = (names or added.get("param_names") or {i: f"{i} of group {len(self.param_groups) - 1}"})[i]
                self._names[p] = name
                own = manifold or manifold_of(p, known)
                if own is not None and not isinstance(own, geoopt.Euclidean):
                    check_point(p, own, f"on-manifold parameter {name}", added)
                    self._manifolds[p], self._versions[p] = own, p._version
                if scale is not None:
                    self._scales[p] = checked_scale(p, scale, name, self._manifolds.get(p), added)
                self._homes[p] = home_of(p, known)
        except BaseException:  # restore the optimizer
            self.param_groups.pop()
            for p in added["params"]:
                for recorded in (self._names, self._manifolds, self._scales, self._homes):
                    recorded.pop(p, None)
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], T]) -> T: ...
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; ``closure`` runs first, with gradients enabled, and its loss is returned.

        A NaN or Inf gradient raises a ValueError that names the parameter, before anything is changed. With
        ``nonfinite="skip"`` the step is skipped; with "ignore" only the gradients of points are checked.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        compiled = torch.compiler.is_compiling()
        if not compiled:
            self._check_homes()
            for p in self._manifolds:
                check_width(p, self._names[p])
        with torch.no_grad():
            if compiled or self._gradients_usable():
                for group in self.param_groups:
                    if not compiled:  # a compiled graph cannot depend on a Python counter
                        group["steps_taken"] = group.get("steps_taken", 0) + 1
                    params = [p for p in group["params"] if p.grad is not None]
                    if ordinary := [p for p in params if p not in self._manifolds]:
                        self._step_ordinary_scaled(group, ordinary)
                    for batch in self._batches(group, [p for p in params if p in self._manifolds]):
                        self._step_points(group, batch)
                        if not compiled:
                            self._versions |= {p: p._version for p in batch.params}
        return loss

    def _check_homes(self) -> None:
        """ValueError if a parameter was constrained or materialized since it was added: the state is another tensor's."""
        known = homes()
        for p, name in self._names.items():
            had, has = self._homes.get(p), home_of(p, known)
            # FSDP2 may have put the gathered parameter in the place of p: then no list has p.
            if has is not had and (has is not None or is_removed(had)):
                change = "added" if had is None else "removed" if has is None else "replaced"
                raise ValueError(
                    f"the constraint of {name} was {change} after this optimizer was made; its state belongs to another "
                    "tensor. Make the optimizer after the constraint"
                )

    def _gradients_usable(self) -> bool:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        sync_free = self._sync_free(params)
        if is_captured() and (self._guard.found_inf is None or not all(self.state[p] for p in params)):
            raise ValueError("a CUDA graph needs steps without a sync (see fused=True), and one before the capture")
        if self._guard.nonfinite == "ignore":
            params = [p for p in params if p in self._manifolds]
        names = [self._names[p] for p in params]
        return self._guard.check(names, local_gradients(params), sync_free, distributed.mesh_reduce(params))

    def _step_ordinary_scaled(self, group: Group, params: list[Tensor]) -> None:
        """With a scale, compute the update from zeros, then scale and add it: it may be tiny relative to the parameter."""
        local = [(p in self._scales, distributed.to_local(p)) for p in params]
        parts = [torch.zeros_like(part) if scaled else part for scaled, part in local]
        self._step_ordinary(group, params, parts)
        for p, part in zip(params, parts, strict=True):
            if p in self._scales:
                distributed.to_local(p).addcmul_(self._scales[p], part)

    def _batches(self, group: Group, points: list[Tensor]) -> list[Batch]:
        """The points of a group that have a gradient, grouped into batches that one call can update."""
        # What is recorded cannot depend on what the host counts or reads.
        recorded = torch.compiler.is_compiling() or is_captured()
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for p in points:
            if not (project := group["project_every"] == 1 or recorded):
                self._updates[p] = self._updates.get(p, 0) + 1
                project = self._updates[p] % group["project_every"] == 1
            if not recorded:
                self._project_if_moved(p)
            if not self.state[p]:
                self.state[p].update(self._new_state(p, self._manifolds[p], group))
            where = (p.device_mesh, p.placements) if distributed.is_dtensor(p) else p.device
            scale, manifold = id(self._scales[p]) if p in self._scales else None, self._manifolds[p]
            # Foreign points move one by one: their manifold's inner may drop dimensions.
            which = manifold_key(manifold) if isinstance(manifold, Stiefel | Sphere) else id(p)
            alike[which, p.shape, p.dtype, where, scale, project].append(p)
        return [self._batch(params, key[-1]) for key, params in alike.items()]

    def _batch(self, params: list[Tensor], project: bool) -> Batch:
        gradients = local_gradients(params)
        if self._guard.needs_rescaling:
            gradients = [rescale_to_range(*pair) for pair in zip(gradients, params, strict=True)]
        states, first = [self.state[p] for p in params], params[0]
        manifold: Any = self._manifolds[first]
        if type(manifold) is Sphere:
            manifold = Spheres.stack([cast(Sphere, self._manifolds[p]) for p in params], params)
        return Batch(params, manifold, gradients, states, self._scales.get(first), project)

    def _project_if_moved(self, p: Tensor) -> None:
        """Project a point that something else, such as nn.init, moved off its manifold since the last step."""
        manifold = self._manifolds[p]
        written = self._versions.get(p, p._version) != p._version
        if written and not manifold.check_point_on_manifold(p, atol=1e-3, rtol=1e-3):
            moved = manifold.projx(p)
            if not distributed.to_local(moved).isfinite().all():
                raise ValueError(
                    f"{self._names[p]} was written to something that has no nearest point of {manifold}, such as a zero row; "
                    "assign the weight, or write other values"
                )
            p.copy_(moved)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim; raises an unreported ValueError about a NaN or Inf gradient of the last steps."""
        self._guard.finish()
        self._check_homes()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim, for the parameters as they are constrained now."""
        self._check_homes()
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also handles loaded states: from torch's optimizers, which have fewer options, or from another device."""
        if any(group.get("amsgrad") for group in state["param_groups"]):
            raise ValueError("the state was saved with amsgrad=True, which this optimizer lacks; start a new one")
        if hasattr(self, "_manifolds"):  # not a copy of an optimizer
            self._check_state_shapes(state)
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # set by torch; not an option of ours
        for group in self.param_groups:
            for option, default in self.defaults.items():
                group.setdefault(option, default)
            for p in group["params"]:
                saved = self.state.get(p, {})
                if saved and p in self._manifolds:
                    saved.setdefault("step", 1.0)  # torch's and geoopt's SGD do not count
                    for key, value in saved.items():  # the fused kernel goes by the order in memory
                        saved[key] = value.contiguous() if isinstance(value, Tensor) else value
                if "step" in saved:
                    saved["step"] = self._step_count(p, saved["step"], group)
                    if group["project_every"] > 1:
                        self._updates[p] = int(saved["step"])

    def state_shapes(self, group: Group, p: Tensor) -> dict[str, torch.Size]:
        """Global shape of each state tensor that a point of this group has after its first step; {} for other parameters."""
        if p not in self._manifolds:
            return {}
        return {key: tensor.shape for key, tensor in self._new_state(p, self._manifolds[p], group).items()}

    def _check_state_shapes(self, state: dict[str, Any]) -> None:
        """ValueError for a state of a parameter that was constrained otherwise: kernels would write past its end."""
        for group in state["param_groups"]:
            for p in group["params"]:
                saved = {k: v for k, v in state["state"].get(p, {}).items() if isinstance(v, Tensor) and v.ndim > 0}
                expected = self.state_shapes({**self.defaults, **group}, p) if saved else {}
                if missing := [key for key, shape in expected.items() if shape and key not in saved]:
                    raise ValueError(
                        f"the state of {self._names[p]} has {', '.join(saved)} and not {', '.join(missing)}: another kind of "
                        "optimizer saved it. Load it there, or start a new optimizer"
                    )
                for key, value in saved.items():
                    shape = expected.get(key, p.shape)
                    if value.shape != shape:
                        raise ValueError(
                            f"expected {key} of shape {tuple(shape)} in the state of {self._names[p]}, got "
                            f"{tuple(value.shape)}: the parameter was constrained otherwise when it was saved. Constrain it "
                            "as it was then, or start a new optimizer"
                        )

    def _step_count(self, p: Tensor, step: Tensor | float, group: Group) -> Tensor:
        """A loaded step count as a tensor on the right device; older torch and geoopt save a number."""
        if p in self._manifolds:
            return torch.as_tensor(step, dtype=torch.float32, device=p.device)
        if isinstance(step, Tensor):
            return step
        return torch.tensor(float(step), dtype=torch.float32, device=p.device if group["fused"] else "cpu")

    def __getstate__(self) -> dict[str, Any]:
        self._check_homes()
        return {
            **super().__getstate__(),
            "_manifolds": self._manifolds,
            "_homes": self._homes,
            "_versions": {},
            "_updates": {},
            "_names": self._names,
            "_scales": self._scales,
            "_guard": NonFiniteGuard(self._guard.nonfinite),
        }


def local_gradients(params: list[Tensor]) -> list[Tensor]:
    """This rank's part of each gradient."""
    return [distributed.to_local(p.grad) for p in params if p.grad is not None]
