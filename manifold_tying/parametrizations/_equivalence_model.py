"""Orthogonal equivalence on the linear layers of a whole model."""

import inspect
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying.parametrizations._equivalence_layer import equivalence
from manifold_tying.parametrizations._layout import Layout
from manifold_tying.parametrizations._plain_weights import keep_plain_weights
from manifold_tying.poet.spec import RotationSpec, check_options, hash_seed, random_seed

TOKEN_LAYERS = ("lm_head", "head", "embed_out", "score", "classifier", "interface", "unembedding", "output_layer")
"""Names of layers that hold the vocabulary or the classes, left alone unless ``exclude`` says otherwise."""
LORA_LAYERS = ("lora_A", "lora_B", "lora_a", "lora_b")
"""Names of a LoRA's own matrices in peft and torchtune, left alone unless ``include`` names them."""


def _patterns(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(p for name in names for p in (name, f"*.{name}", f"{name}.*", f"*.{name}.*"))


_TOKEN_PATTERNS, _LORA_PATTERNS = _patterns(TOKEN_LAYERS), _patterns(LORA_LAYERS)


def equivalence_(
    model: nn.Module,
    include: str | Sequence[str] = ("*",),
    exclude: str | Sequence[str] | None = None,
    *,
    verbose: bool = True,
    **options: Any,
) -> tuple[list[str], list[str]]:
    """:func:`equivalence` on the weight of every ``nn.Linear`` of a model that the patterns choose, in place: all or none.

    Each layer draws its blocks, and a random init, from the seed and its full name, so that layers differ and every process
    and every resumed run agrees. Linear layers whose weight is constrained already, or is also another module's (a tied
    head), are left, and those in which nothing would rotate (one output, with only R learned). So are the two matrices of a
    LoRA, whose product is the update: include="*.lora_A.*" takes them all the same.

    The state dict of a transformers model holds the plain weights, too, so that what ``save_pretrained`` and the Trainer
    write loads into a stock model.

    Args:
        model: changed in place.
        include: shell patterns of full names, as in ``model.named_modules()``.
        exclude: patterns of names to leave; None for heads and token interfaces (:data:`TOKEN_LAYERS`) but those that a
            pattern of ``include`` names ("lm_head", "*.lm_head"), () for none.
        verbose: print what was taken and left.
        options: of :func:`equivalence`.

    Returns:
        (taken, left): the full names of the linear layers with and without one.

    Raises:
        ValueError: the model has no ``nn.Linear``, a pattern matches none, an option is wrong, or a layer cannot be taken;
            nothing is changed.

    >>> equivalence_(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), exclude="2", verbose=False)
    (['0'], ['2'])
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not linears:
        raise ValueError(f"the model has no nn.Linear; {_other_matrices(model)}")
    include = (include,) if isinstance(include, str) else tuple(include)
    given = () if exclude is None else (exclude,) if isinstance(exclude, str) else tuple(exclude)
    for pattern in (*include, *given):
        if not any(_matches(name, [pattern]) for name in linears):
            there = ", ".join(repr(name) for name in linears) or "none"
            raise ValueError(f"pattern {pattern!r} matches no linear layer; there are: {there}")
    excluded = _TOKEN_PATTERNS if exclude is None else given
    asked_for = _naming(include, TOKEN_LAYERS) if exclude is None else []
    lora_asked_for = _naming(include, LORA_LAYERS)
    seed = options.pop("seed", None)
    _check(seed, options)
    taken = [
        name
        for name, module in linears.items()
        if _matches(name, include)
        and (not _matches(name, excluded) or _matches(name, asked_for))
        and (not _matches(name, _LORA_PATTERNS) or _matches(name, lora_asked_for))
        and not parametrize.is_parametrized(module, "weight")
        and _owners(model, module.weight) == 1
        and _rotates(name, module, options)
    ]
    left = [name for name in linears if name not in taken]
    if seed is None:
        seed = random_seed()
    for name in taken:
        equivalence(linears[name], seed=hash_seed(seed, name), **options)
    keep_plain_weights(model)
    if verbose:
        print(f"orthogonal equivalence on {len(taken)} linear layers: {', '.join(taken) or 'none'}")
        print(f"left as they are: {', '.join(left) or 'none'}")
    return taken, left


def _other_matrices(model: nn.Module) -> str:
    """What else has a weight that :func:`equivalence` takes, for instance the Conv1D layers of GPT-2 in transformers."""
    weights = [(type(module).__name__, module._parameters.get("weight")) for module in model.modules()]
    kinds = sorted({kind for kind, weight in weights if weight is not None and weight.ndim >= 2})
    if not kinds:
        return "there is no weight matrix in it"
    return f"weight matrices are in {', '.join(kinds)}: call equivalence(module) on each layer that is meant"


def _owners(model: nn.Module, weight: Tensor) -> int:
    """How many tensors of the model's modules this parameter is."""
    return sum(tensor is weight for module in model.modules() for tensor in module._parameters.values())


def _naming(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The patterns in which one of the names is a part of its own."""
    return [p for p in patterns if any(part.strip("*") in names for part in p.split("."))]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check(seed: int | None, options: dict[str, Any]) -> None:
    """Fill the options up with the defaults of :func:`equivalence`; ValueError for wrong ones."""
    parameters = inspect.signature(equivalence).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "seed"}
    if unknown := sorted(set(options) - set(defaults)):
        raise ValueError(f"unknown options {', '.join(unknown)}; equivalence takes {', '.join(defaults)}, seed")
    options.update({**defaults, **options})
    check_options(seed=seed, **options)


def _rotates(name: str, module: nn.Linear, options: dict[str, Any]) -> bool:
    """Whether anything of this layer would rotate; ValueError for one that cannot be constrained."""
    try:
        rows, columns = Layout.of(module, "weight").shape
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    sizes = {key: options[key] for key in ("scheme", "block_size", "fraction", "out_share", "sides")}
    return RotationSpec.of(rows, columns, **sizes).num_params > 0
