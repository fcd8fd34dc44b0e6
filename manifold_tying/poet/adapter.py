"""Adapters: the skew vectors that finetuning by orthogonal equivalence learned, saved as a file for the base model."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from manifold_tying._extra import needs_extra
from manifold_tying._json import NotJSON, parsed
from manifold_tying.parametrizations import CONVOLUTIONS, Layout
from manifold_tying.poet.apply import keep_plain_weights, other_parameters, plain_name, register_equivalence
from manifold_tying.poet.parametrization import Equivalence, check_drift, equivalences
from manifold_tying.poet.spec import BlockSpec, RotationSpec, check_seed, check_terms

M = TypeVar("M", bound=nn.Module)
_FORMAT = "manifold-tying equivalence adapter 1"
_PARTS = ("skew", "out_order", "in_order")
_DIGESTS = ("base", "base_float16")


def save_adapter(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Save the skew vectors of every equivalence in ``model``, and the dimensions that they rotate, as safetensors.

    The file holds only a digest of W0; :func:`load_adapter` applies the rotations to the model that finetuning started from.
    Nothing may have been merged, and no other parameter may require a gradient: the file would not hold what it learned, nor
    does it hold buffers that training changes, such as BatchNorm's statistics. The names are those without torch.compile,
    checkpoint wrappers and data parallelism. Warns if R and P are not orthogonal to within 1e-3.

    Raises:
        ValueError: the model has no equivalence, one was merged, another parameter trains, or the folder does not exist;
            nothing is written.
    """
    found = [(plain_name(name), part, stored) for name, part, stored in equivalences(_unwrapped(model))]
    if not found:
        raise ValueError(
            "the model has no equivalence to save; call equivalence or equivalence_ on it before finetuning"
        )
    if merged := [name for name, part, _ in found if part.merges]:
        raise ValueError(
            f"merging changed W0 of {', '.join(merged)}, which an adapter does not hold; save the state dict instead"
        )
    if trained := [plain_name(name) for name, p in other_parameters(_unwrapped(model)) if p.requires_grad]:
        raise ValueError(
            f"an adapter does not hold {', '.join(trained[:3])}{f' and {len(trained) - 3} more' * (len(trained) > 3)}, which "
            "require gradients; freeze them before finetuning, by equivalence_(model, freeze=True) or requires_grad_(False), "
            "or save the state dict instead"
        )
    check_drift(found)
    tensors: dict[str, Tensor] = {}
    described = {}
    for name, part, stored in found:
        for key, value in zip(_PARTS, (stored, part.out_order, part.in_order), strict=True):
            tensors[f"{name}.{key}"] = value.detach().cpu().contiguous()
        R, P = part.spec.R, part.spec.P
        described[name] = {
            "rows": [R.n, R.block, R.num_rotated], "columns": [P.n, P.block, P.num_rotated], "terms": part.spec.terms,
            "seed": int(part.seed), "shape": list(part.layout.shape),
            **dict(zip(_DIGESTS, _digests(part.base), strict=True)),
        }  # fmt: skip
    metadata = {"format": _FORMAT, "equivalences": json.dumps(described)}
    final = Path(path)
    if not final.parent.is_dir():
        raise ValueError(f"cannot write {final}, its folder does not exist; make {final.parent} first")
    draft = final.with_name(f".{final.name}.{os.getpid()}.draft")
    try:
        _safetensors().torch.save_file(tensors, draft, metadata)
        os.replace(draft, final)  # atomic
    finally:
        draft.unlink(missing_ok=True)
    return final


def load_adapter(model: M, path: str | os.PathLike[str]) -> M:
    """Apply the rotations of :func:`save_adapter` to the model that they were learned for, in place, and return it.

    A plain weight gets its equivalence, with the weight as W0. A weight that already has the same equivalence gets the new
    values. :func:`materialize` then turns the model into a plain one. Warns if R and P are not orthogonal to within 1e-3.

    Raises:
        ValueError: the file is not an adapter, is corrupt, or belongs to another model; nothing is changed.
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
        entries = [AdapterEntry.parse(_unwrapped(model), name, values, tensors) for name, values in described.items()]
    except (KeyError, TypeError, AttributeError, NotJSON) as error:
        raise ValueError(f"{path} is damaged, {error!r}; take another copy of it") from error
    if not entries or len(tensors) != len(_PARTS) * len(entries):
        raise ValueError(f"{path} is damaged: it describes {len(entries)} weights and has {len(tensors)} tensors")
    if len({entry.weight for entry in entries}) != len(entries):
        raise ValueError(
            f"{path} rotates one tensor of this model twice; load it on a model whose weights are not tied"
        )
    check_drift([entry.apply_() for entry in entries])
    keep_plain_weights(_unwrapped(model))
    return model


@dataclass(frozen=True)
class AdapterEntry:
    """One weight's part of an adapter, checked against the model."""

    path: str
    owner: nn.Module
    name: str
    layout: Layout | None
    """None if the model already has the equivalence."""
    spec: RotationSpec
    seed: int
    values: tuple[Tensor, ...]

    @classmethod
    def parse(
        cls, model: nn.Module, path: str, described: dict[str, Any], tensors: dict[str, Tensor]
    ) -> "AdapterEntry":
        """ValueError unless the description, the tensors and the model's weight agree."""
        prefix, _, name = path.rpartition(".")
        owner = {plain_name(own): module for own, module in model.named_modules()}.get(prefix)
        if owner is None:
            raise ValueError(f"the adapter is for {path!r}, which this model does not have")
        try:
            check_terms(described["terms"])
            spec = RotationSpec(BlockSpec(*described["rows"]), BlockSpec(*described["columns"]), described["terms"])
            check_seed(described["seed"])
        except ValueError as error:
            raise ValueError(f"the adapter's description of {path} is damaged: {error}; take another copy") from error
        present = _equivalence_of(owner, name)
        if present is None:
            layout, base = Layout.of(owner, name), getattr(owner, name)
        else:
            layout, base = None, present[0].base
            if (present[0].spec, int(present[0].merges)) != (spec, 0):
                raise ValueError(f"{path} has an equivalence of other sizes, terms or merges; materialize it first")
        known = {described[name] for name in _DIGESTS}
        if list(base.shape) != described["shape"] or known.isdisjoint(_digests(base)):
            raise ValueError(
                f"{path} is not the weight that the adapter was learned for; load it on the model that finetuning started "
                "from, in its dtype or in float32"
            )
        skew, *orders = (tensors[f"{path}.{key}"] for key in _PARTS)
        matrix = Layout(base.shape, flatten=isinstance(owner, CONVOLUTIONS)).matrix_shape
        if not (
            (spec.R.n, spec.P.n) == matrix[-2:]
            and skew.shape == (*matrix[:-2], spec.num_params)
            and skew.is_floating_point()
            and skew.isfinite().all()
            and all(_is_valid_order(order, side) for order, side in zip(orders, (spec.R, spec.P), strict=True))
        ):
            raise ValueError(f"the adapter's values for {path} are damaged; take another copy of the file")
        return cls(path, owner, name, layout, spec, described["seed"], (skew, *orders))

    @property
    def weight(self) -> int:
        """Identifies the model's tensor that this entry changes."""
        present = _equivalence_of(self.owner, self.name)
        return id(self.owner._parameters[self.name] if present is None else present[1])

    @torch.no_grad()
    def apply_(self) -> tuple[str, Equivalence, Tensor]:
        """Add the equivalence if it is missing, and set its values."""
        if self.layout is not None:
            register_equivalence(self.owner, self.name, self.layout, self.spec, self.seed)
        found = _equivalence_of(self.owner, self.name)
        assert found is not None
        part, stored = found
        skew, *orders = self.values
        stored.copy_(skew)
        part.set_permutations(part.base, *orders)
        part.seed.fill_(self.seed)
        return self.path, part, stored.detach()


def _equivalence_of(owner: nn.Module, name: str) -> tuple[Equivalence, Tensor] | None:
    return next(((part, stored) for own, part, stored in equivalences(owner) if own == name), None)


def _is_valid_order(order: Tensor, side: BlockSpec) -> bool:
    """Whether order lists ``num_rotated`` different dimensions of a side."""
    if order.dtype != torch.int64 or order.shape != (side.num_rotated,):
        return False
    return not len(order) or (bool(0 <= order.min() and order.max() < side.n) and len(order.unique()) == len(order))


def _digests(base: Tensor) -> tuple[str, str]:
    """Digests of the bfloat16 values, directly and by way of float16.

    They match for one dtype, and for float32 with any other; not for bfloat16 with float16, which has rounded differently.
    """
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


def _safetensors() -> Any:
    with needs_extra("huggingface", "adapters need"):
        import safetensors.torch
    return safetensors
