"""Parameter groups that record the manifold of each point."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import distributed
from manifold_tying._geoopt import geoopt
from manifold_tying.manifolds import Sphere
from manifold_tying.optim.rules import manifold_key
from manifold_tying.parametrizations import manifolds_in, points


def param_groups(
    model: nn.Module,
    *,
    manifold_lr: float | None = None,
    weight_decay: float = 0.0,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Groups for the Riemannian optimizers, with every trainable parameter in exactly one group.

    Points are found through their parametrization (``.manifold``), at any depth, or as geoopt.ManifoldParameter. Weight decay
    applies to matrices only: points, parameters behind a parametrization, vectors and scalars (gains, biases) get none. Tables
    of tokens and heads get "use_muon": False, which keeps :class:`RiemannianMuon` from them: embeddings, linear layers of the
    longest one's shape, and the last linear layer if it has another one's. Name a classifier's head in ``overrides``.

    Args:
        model: the model to train.
        manifold_lr: learning rate of the points; None means the optimizer's lr.
        weight_decay: for ordinary matrices.
        overrides: maps full-name patterns (shell style, first match wins) to options for the matching parameters, for
            instance {"*cholesky_factor*": {"lr": 0.04}}. A constrained weight has its plain name too, as "rnn.weight_hh_l0".

    Returns:
        dicts with "params", "names", "weight_decay", and where they apply "manifold", "lr" and the overrides.

    Raises:
        ValueError: a pattern matches nothing, or the model was flattened (FSDP1, ZeRO-3), which loses its points.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model (nn.Module), to find parameters by name, got {type(model).__name__}")
    distributed.reshard_fsdp(model)
    overrides = dict(overrides or {})
    if wrong := [pattern for pattern, options in overrides.items() if not isinstance(options, Mapping)]:
        raise ValueError(
            f'expected overrides to map a pattern to options, such as {{"lr": 0.1}}, got {overrides[wrong[0]]!r}'
        )
    manifolds, parametrized = _constrained(model)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    tables = _tables(model)
    matched = set()
    for name, p in model.named_parameters():
        weight = re.sub(r"\.original\d*$", "", name.replace("parametrizations.", ""))  # the name without the constraint
        pattern = next((pattern for pattern in overrides if fnmatchcase(name, pattern) or weight == pattern), None)
        matched.add(pattern)
        if not p.requires_grad:
            continue
        manifold = manifolds.get(p)
        options: dict[str, Any] = {"weight_decay": weight_decay if p.ndim >= 2 and p not in parametrized else 0.0}
        if manifold is not None:
            # A group of spheres may have many radii: each point has its own manifold.
            options |= {"weight_decay": 0.0} | ({} if type(manifold) is Sphere else {"manifold": manifold})
            if manifold_lr is not None:
                options["lr"] = manifold_lr
        if p in tables:
            options["use_muon"] = False
        options |= overrides[pattern] if pattern else {}
        key = (pattern, p in tables, options["weight_decay"], None if manifold is None else manifold_key(manifold))
        group = groups.setdefault(key, {"params": [], "names": [], **options})
        group["params"].append(p)
        group["names"].append(name)
    if unused := [pattern for pattern in overrides if pattern not in matched]:
        known = ", ".join(name for name, _ in model.named_parameters())
        raise ValueError(
            f"no parameter matches {', '.join(map(repr, unused))}, or an earlier pattern takes it; the model has {known}"
        )
    return list(groups.values())


def _constrained(model: nn.Module) -> tuple[dict[Tensor, geoopt.Manifold], set[Tensor]]:
    """Points with their manifolds, and all parameters behind a parametrization."""
    lists = {path: part for path, part in model.named_modules() if isinstance(part, parametrize.ParametrizationList)}
    for path, parts in lists.items():
        for key, manifold in manifolds_in(parts).items():
            if parts._parameters.get(key) is None:
                raise ValueError(
                    f"{path} is constrained to {manifold}, but its stored tensor is no longer a parameter. Was the model "
                    "flattened (FSDP1, ZeRO-3)? Use FSDP2, which keeps parameters"
                )
    parametrized: set[Tensor] = {p for parts in lists.values() for p in parts.parameters(recurse=False)}
    return {point: manifold for _, point, manifold in points(model)}, parametrized


def _tables(model: nn.Module) -> set[Tensor]:
    """Parameters of embeddings, of token interfaces and of heads.

    Heads are the linear layers with the shape of the longest embedding, and the last one if it has that of another embedding:
    a table of positions may be longer. A square table may have the shape of hidden layers.
    """
    parts = list(model.modules())
    embeddings = [part for part in parts if isinstance(part, nn.Embedding)]
    shapes = {(part.num_embeddings, part.embedding_dim) for part in embeddings}
    linear = [(part, (part.out_features, part.in_features)) for part in parts if isinstance(part, nn.Linear)]
    heads = [part for part, shape in linear if shape == max(shapes, default=None)]
    heads += [part for part, (out, width) in linear[-1:] if (out, width) in shapes and out != width]
    interfaces = [part for part in parts if hasattr(part, "embed") and hasattr(part, "logits")]
    return {p for part in (*embeddings, *heads, *interfaces) for p in part.parameters()}
