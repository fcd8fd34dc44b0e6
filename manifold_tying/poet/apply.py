"""Orthogonal equivalence on a layer or a model, merging, and plain weights in a transformers state dict."""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from manifold_tying import distributed, precision
from manifold_tying.parametrizations import Layout, constraints, is_ours, parametrized, register, shared_parameters
from manifold_tying.poet.parametrization import Equivalence, equivalences, merge_all
from manifold_tying.poet.spec import (
    Init,
    RotationSpec,
    Scheme,
    Sides,
    check_options,
    hash_seed,
    initial_matrix,
    random_seed,
)

M = TypeVar("M", bound=nn.Module)

HEAD_NAMES = ("lm_head", "head", "embed_out", "score", "classifier", "interface", "unembedding", "output_layer")
"""Layers that hold the vocabulary or the classes; skipped by default."""
LORA_NAMES = ("lora_A", "lora_B", "lora_a", "lora_b")
"""The matrices of a LoRA in peft and torchtune; skipped unless ``include`` names them."""


def equivalence(
    module: M,
    name: str = "weight",
    *,
    scheme: Scheme = "block",
    block_size: int = 256,
    fraction: float | None = None,
    terms: int | None = None,
    init: Init = "keep",
    seed: int | None = None,
    out_share: float | None = None,
    sides: Sides = "both",
) -> M:
    """Train ``module.name`` as W = R W0 P: W0 is fixed, the orthogonal R (rows, outputs) and P (columns, inputs) are learned.

    W keeps the singular values of W0 to rounding, unless ``terms`` says otherwise. R and P start as the identity: with
    init="keep" the weight is unchanged bit for bit, and a linear layer's output changes only by rounding. The only parameter
    is a float32 vector of skew entries (float64 for float64), which any optimizer trains; everything else is buffers. Call
    :func:`merge` every few hundred steps to multiply R and P into W0.

    An ``nn.Linear`` keeps no matrix of W's size for the backward. Shapes are those of :func:`stiefel`, but wide matrices are
    not transposed: R acts on the first dimension of a kernel, P on the rest. W0 has the layer's dtype: a bfloat16 layer
    rounds W0 at every merge; a float32 layer under autocast does not.

    Args:
        module: the layer, changed in place and returned.
        name: its parameter.
        scheme: "block" (POET-BS) rotates every dimension, in blocks of b; the last block is smaller if b does not divide.
            "full" (POET-FS) rotates one block of random dimensions until the next merge.
        block_size: b, clamped to the dimension. b(b-1)/2 parameters per block.
        fraction: replaces block_size with scheme "full": b = fraction m for R and fraction n for P.
        terms: None for the exact Cayley map; k for the paper's Neumann series of k terms, which is faster on a GPU. Two terms
            are orthogonal only to ‖A‖⁶ for skew matrices A: keep ‖A‖ below 0.3 by merges and the learning rate.
        init: initial W0: "keep"; "normalized", Gaussian with rows of norm 1 (what POET uses for pretraining);
            "uniform-spectrum", Gaussian with all singular values set to 1; "xavier", N(0, 2/(m + n)); "standard", N(0, 0.02²),
            as in Llama.
        seed: seed for the permutations and a random init; None draws one from torch's generator.
        out_share: share of the parameters that R gets, by choosing its block size: 1.0 only R, 0.0 only P, None the same
            block size (or fraction) on both sides. (POET, figure 5.) The total stays the same, so the side with the larger
            share has larger blocks.
        sides: the sides that rotate, in blocks of ``block_size``: "both", "in" (P only, the inputs: orthogonal finetuning) or
            "out" (R only).

    Raises:
        ValueError: an option is out of range; the blocks are so small that nothing rotates; ``name`` as for :func:`stiefel`.

    >>> layer = equivalence(nn.Linear(64, 32), block_size=16)
    >>> sum(p.numel() for p in layer.parametrizations.parameters()) == (64 + 32) * 15 // 2
    True
    """
    check_options(scheme, block_size, fraction, terms, init, seed, out_share, sides)
    layout = Layout.of(module, name)
    rows, columns = layout.matrix_shape[-2:]
    spec = RotationSpec.of(rows, columns, scheme, block_size, fraction, out_share, sides, terms)
    if not spec.num_params:
        raise ValueError(
            f"a matrix of {rows} x {columns} with blocks of {spec.R.block} and {spec.P.block} has nothing to rotate; "
            "choose a larger block_size, fraction or share, or other sides"
        )
    _start(module, name, layout, spec, init, random_seed() if seed is None else seed)
    return module


@torch.inference_mode(False)
def _start(module: nn.Module, name: str, layout: Layout, spec: RotationSpec, init: Init, seed: int) -> None:
    weight = getattr(module, name)
    device, dtype = weight.device, precision.compute_dtype(weight.dtype)
    register(module, name, Equivalence(layout, weight.dtype, spec, seed, weight))
    if init != "keep":
        setattr(module, name, initial_matrix(layout.matrix_shape, init, seed).view(layout.shape).to(device, dtype))


def equivalence_(
    model: nn.Module,
    include: str | Sequence[str] = ("*",),
    exclude: str | Sequence[str] | None = None,
    *,
    freeze: bool = False,
    verbose: bool = True,
    **options: Any,
) -> tuple[list[str], list[str]]:
    """Apply :func:`equivalence` to the weight of every ``nn.Linear`` that the patterns select, in place: all or none.

    Each layer derives its blocks, and a random init, from the seed and its full name: layers differ, while all ranks and
    resumed runs agree. Skipped are weights that are constrained already or shared with another module (a tied head), layers
    in which nothing would rotate (one output, with only R learned), and the two matrices of a LoRA, whose product is the
    update; include="*.lora_A.*" selects those as well.

    The state dict of a transformers model then also holds the plain weights, so a stock model loads what
    ``save_pretrained`` and the Trainer write.

    Args:
        model: changed in place.
        include: shell patterns of full names, as in ``model.named_modules()``.
        exclude: patterns of names to skip; () for none. None skips heads and token interfaces (:data:`HEAD_NAMES`), except
            those that a pattern of ``include`` names ("lm_head", "*.lm_head").
        freeze: turn off the gradients of all other parameters, biases and tables included, as PEFT does. By default they
            train as before.
        verbose: print which layers were selected and which were skipped.
        options: options of :func:`equivalence`.

    Returns:
        (taken, left): the full names of the linear layers with and without an equivalence.

    Raises:
        ValueError: no ``nn.Linear`` is selected, a pattern matches none, an option is wrong, or a layer cannot be
            constrained; nothing is changed.

    >>> equivalence_(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), exclude="2", verbose=False)
    (['0'], ['2'])
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    defaults = dict(equivalence.__kwdefaults__ or {})
    if unknown := sorted(set(options) - set(defaults)):
        raise ValueError(f"unknown options {', '.join(unknown)}; equivalence takes {', '.join(defaults)}")
    options = {**defaults, **options}
    check_options(**options)
    seed = options.pop("seed")
    include = (include,) if isinstance(include, str) else tuple(include)
    exclude = (exclude,) if isinstance(exclude, str) else exclude
    if not (selected := _selected(linears, include, exclude) if linears else []):
        weights = [(type(module).__name__, module._parameters.get("weight")) for module in model.modules()]
        kinds = sorted({kind for kind, weight in weights if weight is not None and weight.ndim >= 2})  # GPT-2's Conv1D
        raise ValueError(
            f"no nn.Linear is selected (there are: {', '.join(linears) or 'none'}); weight matrices are in "
            f"{', '.join(kinds) or 'no layer'}: call equivalence(module) on each layer to constrain"
        )
    shared = shared_parameters([module._parameters.get("weight") for module in linears.values()])
    plans = {
        name: _plan(name, linears[name], options)
        for name in selected
        if not parametrize.is_parametrized(linears[name], "weight") and id(linears[name].weight) not in shared
    }
    taken = [name for name, (_, spec) in plans.items() if spec.num_params]
    left = [name for name in linears if name not in taken]
    seed = random_seed() if seed is None else seed
    for name in taken:
        _start(linears[name], "weight", *plans[name], options["init"], hash_seed(seed, plain_name(name)))
    keep_plain_weights(model)
    if freeze:
        model.requires_grad_(False)
        for _, _, stored in equivalences(model):
            stored.requires_grad_()
    if verbose:
        print(f"orthogonal equivalence on {len(taken)} linear layers: {', '.join(taken) or 'none'}")
        print(f"left unchanged: {', '.join(left) or 'none'}")
    return taken, left


def plain_name(path: str) -> str:
    """The name without what torch.compile and activation checkpointing insert."""
    return ".".join(part for part in path.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


def _selected(names: Iterable[str], include: Sequence[str], exclude: Sequence[str] | None) -> list[str]:
    """The names that the patterns select; ValueError for a pattern that matches none."""
    names = list(names)
    for pattern in (*include, *(exclude or ())):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"pattern {pattern!r} matches no linear layer; there are: {', '.join(map(repr, names))}")
    kinds = (LORA_NAMES, HEAD_NAMES) if exclude is None else (LORA_NAMES,)  # skipped unless a pattern names them

    def takes(name: str) -> bool:
        patterns = [pattern for pattern in include if fnmatchcase(name, pattern)]
        skipped = any(_has_part(name, kind) and not any(_has_part(own, kind) for own in patterns) for kind in kinds)
        return bool(patterns) and not skipped and not any(fnmatchcase(name, pattern) for pattern in exclude or ())

    return [name for name in names if takes(name)]


def _has_part(name: str, parts: Sequence[str]) -> bool:
    """Whether one of the parts is a dot-separated component of the name or pattern."""
    return any(part.strip("*") in parts for part in name.split("."))


def _plan(name: str, module: nn.Linear, options: dict[str, Any]) -> tuple[Layout, RotationSpec]:
    """What :func:`equivalence` would do; ValueError if the layer cannot be constrained. ``seed`` is not among the options."""
    try:
        layout = Layout.of(module, "weight", shared=())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return layout, RotationSpec.of(*layout.shape, **{key: value for key, value in options.items() if key != "init"})


def merge(module: nn.Module) -> int:
    """W0 <- R W0 P for every equivalence in ``module``. W is unchanged; R and P restart at the identity with new blocks.

    Computed in float32 (float64 for float64). The parameters stay the same objects: they are zeroed in place and lose their
    gradients. An optimizer's moments still belong to the old blocks; :class:`MergeSchedule` resets them. Warns if R and P are
    not orthogonal to within 1e-3.

    Returns:
        number of merged weights.

    >>> from manifold_tying import equivalence
    >>> layer = equivalence(nn.Linear(8, 8))
    >>> merge(layer)
    1
    """
    distributed.reshard_fsdp(module)
    merge_all(found := equivalences(module))
    return len(found)


def keep_plain_weights(model: nn.Module) -> None:
    """Add every constrained weight to the state dict of a model with ``save_pretrained``, next to its stored tensor.

    A stock transformers model loads the plain weight, which it would otherwise initialize randomly; a model with the
    constraints ignores it. ``equivalence_`` calls this. Call it once yourself after constraining single layers.
    """
    if hasattr(model, "save_pretrained") and _add not in model._state_dict_hooks.values():
        model.register_state_dict_post_hook(_add)
        model.register_load_state_dict_pre_hook(_drop)


@torch.no_grad()
def _add(model: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    for name, parts in _constrained(model, state, prefix):
        weight = distributed.full_tensor(parts.original.detach())
        for part in parts:
            weight = part(weight)
        state[name] = weight.clone()  # safetensors rejects tensors that share memory


def _drop(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, _parts in _constrained(model, state, prefix):
        state.pop(name, None)


def _constrained(model: nn.Module, state: dict[str, Any], prefix: str) -> Iterator[tuple[str, ParametrizationList]]:
    """(weight name, constraint) of the layers that a stock model also has, whose stored tensors are in the state."""
    for name, owner, own in constraints(model):
        if not is_ours(owner) and f"{prefix}{name.removesuffix(own)}parametrizations.{own}.original" in state:
            yield f"{prefix}{name}", parametrized(owner)[own]
