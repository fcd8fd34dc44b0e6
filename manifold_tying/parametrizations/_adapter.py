"""Skew vectors alone as a file: what finetuning by orthogonal equivalence learned, for the model that it started from."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from manifold_tying._json import NotJSON, parsed
from manifold_tying.parametrizations._equivalence import equivalences
from manifold_tying.parametrizations._equivalence_layer import register_equivalence
from manifold_tying.parametrizations._layout import CONVOLUTIONS, Layout
from manifold_tying.parametrizations._plain_weights import keep_plain_weights
from manifold_tying.poet.rotation import warn_if_not_orthogonal
from manifold_tying.poet.spec import BlockSpec, RotationSpec, check_seed, check_terms

M = TypeVar("M", bound=nn.Module)
_FORMAT = "manifold-tying equivalence adapter 1"
_PARTS = ("skew", "out_order", "in_order")
_DIGESTS = ("base", "base_float16")


def save_adapter(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write the skew vectors of every equivalence in ``model``, and the dimensions that they rotate, as safetensors.

    W0 is not in the file, only a digest of it: :func:`load_adapter` puts the rotations on the model that finetuning
    started from. For that, nothing may have been merged. Names are those of the model itself, where it is compiled or
    wrapped for data parallelism. Warns where R and P were not orthogonal to 1e-3 any more.

    Raises:
        ValueError: the model has no equivalence, one was merged, or there is no such folder; nothing is written.
    """
    found = [(_plain_name(name), part, stored) for name, part, stored in equivalences(_unwrapped(model))]
    if not found:
        raise ValueError(
            "the model has no equivalence to save; call equivalence or equivalence_ on it before finetuning"
        )
    if merged := [name for name, part, _ in found if part.merges]:
        raise ValueError(
            f"merging changed W0 of {', '.join(merged)}, which an adapter does not hold; save the whole model"
        )
    warn_if_not_orthogonal([(name, part.spec, stored) for name, part, stored in found])
    tensors: dict[str, Tensor] = {}
    described = {}
    for name, part, stored in found:
        values = (stored, part.out_order, part.in_order)
        tensors |= {
            f"{name}.{key}": value.detach().cpu().contiguous() for key, value in zip(_PARTS, values, strict=True)
        }
        described[name] = {
            "rows": _numbers(part.spec.R), "columns": _numbers(part.spec.P), "terms": part.spec.terms, "seed": int(part.seed),
            "shape": list(part.layout.shape), **dict(zip(_DIGESTS, _digests(part.base), strict=True)),
        }  # fmt: skip
    metadata = {"format": _FORMAT, "equivalences": json.dumps(described)}
    final = Path(path)
    if not final.parent.is_dir():
        raise ValueError(f"expected a file in a folder that exists, got {final}; make {final.parent} first")
    draft = final.with_name(f".{final.name}.{os.getpid()}.draft")
    try:
        _safetensors().torch.save_file(tensors, draft, metadata)
        os.replace(draft, final)  # a reader sees the file before or the one after
    finally:
        draft.unlink(missing_ok=True)
    return final


def load_adapter(model: M, path: str | os.PathLike[str]) -> M:
    """Put the rotations of :func:`save_adapter` on the model that they were learned for, in place; returns it.

    Weights that are plain get their equivalence, with the weight as W0; those that have the same one already get the
    values. :func:`materialize` then makes a plain model of it. Warns where R and P are not orthogonal to 1e-3.

    Raises:
        ValueError: the file is no adapter, is damaged, or is one of another model; nothing is changed.
    """
    library = _safetensors()
    try:
        with library.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except Exception as error:
        raise ValueError(f"cannot read {path} as safetensors: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"expected {path} to be a {_FORMAT}, got format {metadata.get('format')!r}")
    try:
        described: dict[str, Any] = parsed(metadata["equivalences"])
        changes = [_Change.planned(_unwrapped(model), name, values, tensors) for name, values in described.items()]
    except (KeyError, TypeError, AttributeError, NotJSON) as error:
        raise ValueError(f"{path} is damaged, {error!r}; take another copy of it") from error
    if not changes or len(tensors) != len(_PARTS) * len(changes):
        raise ValueError(f"{path} is damaged: it describes {len(changes)} weights and has {len(tensors)} tensors")
    if len({change.weight for change in changes}) != len(changes):
        raise ValueError(
            f"{path} rotates one tensor of this model twice; load it on a model whose weights are not tied"
        )
    warn_if_not_orthogonal([change.make() for change in changes])
    keep_plain_weights(_unwrapped(model))
    return model


@dataclass(frozen=True)
class _Change:
    """One weight's part of an adapter, checked against the model."""

    path: str
    owner: nn.Module
    name: str
    layout: Layout | None
    """None where the equivalence is there already."""
    spec: RotationSpec
    seed: int
    values: tuple[Tensor, ...]

    @classmethod
    def planned(cls, model: nn.Module, path: str, described: dict[str, Any], tensors: dict[str, Tensor]) -> "_Change":
        prefix, _, name = path.rpartition(".")
        owner = {_plain_name(own): module for own, module in model.named_modules()}.get(prefix)
        if owner is None:
            raise ValueError(f"the adapter is for {path!r}, which this model does not have")
        try:
            check_terms(described["terms"])
            spec = RotationSpec(BlockSpec(*described["rows"]), BlockSpec(*described["columns"]), described["terms"])
            check_seed(described["seed"])
        except ValueError as error:
            raise ValueError(f"the adapter's description of {path} is damaged: {error}; take another copy") from error
        there = {own: part for own, part, _ in equivalences(owner) if own == name}.get(name)
        if there is None:
            layout, base = Layout.of(owner, name), getattr(owner, name)
        else:
            layout, base = None, there.base
            if (there.spec, int(there.merges)) != (spec, 0):
                raise ValueError(f"{path} has an equivalence of other sizes, terms or merges; materialize it first")
        known = {described["base"], described.get("base_float16", described["base"])}
        if list(base.shape) != described["shape"] or known.isdisjoint(_digests(base)):
            raise ValueError(
                f"{path} is not the weight that the adapter was learned for; load it on the model that finetuning started "
                "from"
            )
        skew, *orders = (tensors[f"{path}.{key}"] for key in _PARTS)
        matrix = Layout(base.shape, flatten=isinstance(owner, CONVOLUTIONS)).matrix_shape
        whole = (spec.R.n, spec.P.n) == matrix[-2:] and skew.shape == (*matrix[:-2], spec.num_params)
        orders_fit = whole and all(
            order.dtype == torch.int64
            and order.shape == (side.num_rotated,)
            and len(order.unique()) == side.num_rotated
            and _within(order, side.n)
            for order, side in zip(orders, (spec.R, spec.P), strict=True)
        )
        if not (whole and orders_fit and skew.is_floating_point() and skew.isfinite().all()):
            raise ValueError(f"the adapter's numbers for {path} are damaged; take another copy of the file")
        return cls(path, owner, name, layout, spec, described["seed"], (skew, *orders))

    @property
    def weight(self) -> int:
        """Which tensor of the model this changes."""
        return id(self.owner if self.layout is None else self.owner._parameters[self.name])

    @torch.no_grad()
    def make(self) -> tuple[str, RotationSpec, Tensor]:
        if self.layout is not None:
            register_equivalence(self.owner, self.name, self.layout, self.spec, self.seed)
        (part, stored) = next((part, stored) for own, part, stored in equivalences(self.owner) if own == self.name)
        skew, *orders = self.values
        stored.copy_(skew)
        part.rearrange(part.base, *orders)
        part.seed.fill_(self.seed)
        return self.path, self.spec, stored.detach()


def _numbers(side: BlockSpec) -> list[int]:
    return [side.n, side.block, side.num_rotated]


def _within(order: Tensor, n: int) -> bool:
    return not len(order) or bool(0 <= order.min() and order.max() < n)


def _digests(base: Tensor) -> tuple[str, str]:
    """Of the values rounded to bfloat16, and to float16 and then bfloat16: models loaded in any of the three dtypes agree."""
    values = base.detach().cpu()
    return _digest(values), _digest(values.half())


def _digest(values: Tensor) -> str:
    rounded = values.bfloat16().contiguous().view(torch.uint8)
    return hashlib.blake2b(rounded.numpy().tobytes(), digest_size=16).hexdigest()


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and data parallelism."""
    if "_orig_mod" in model._modules:
        return _unwrapped(model.get_submodule("_orig_mod"))
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return _unwrapped(model.module)
    return model


def _plain_name(path: str) -> str:
    """The name without the parts that torch.compile adds."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "adapters are safetensors files; pip install safetensors", name="safetensors"
        ) from error
    return safetensors
