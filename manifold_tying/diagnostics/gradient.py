"""The gradient of a token table by its two sources: the lookup, which reads it, and the head, which writes with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying.diagnostics.bases import vector_angles
from manifold_tying.diagnostics.interface import embedding_and_head
from manifold_tying.diagnostics.tokens import frequency_buckets
from manifold_tying.tying import TokenInterface


@dataclass(frozen=True, slots=True)
class SideGradients:
    """∂ℓ/∂θ = lookup + head of one parameter of the token interface, detached."""

    lookup: Tensor
    """Through the embeddings: non-zero for tokens of the batch only, where θ is a table."""
    head: Tensor
    """Through the logits, hidden states held fixed: for every token, since every one has a probability."""


@dataclass(frozen=True, slots=True)
class BucketGradients:
    """The two parts over the rows of one frequency bucket."""

    bucket: str
    tokens: int
    touched: int
    """Rows that the lookup reaches."""
    lookup_norm: float
    head_norm: float
    angle: float
    """Between the two parts, radians, NaN where one is zero; above π/2 they pull against each other."""


def split_gradient(
    model: nn.Module, ids: Tensor, targets: Tensor, *, ignore_index: int = -100
) -> dict[str, SideGradients]:
    """The gradient of the mean cross-entropy for each trainable parameter of the token interface, by side, by name.

    With h the hidden states that the head multiplies: head = ∂ℓ/∂θ at fixed h, and lookup = (∂ℓ/∂h) (∂h/∂θ), since h
    depends on θ through the embeddings alone. Two backward passes, exact for every interface: for transpose tying the two
    terms that a shared table has, sparse and dense, for PIT the same for Z and for L, for untied tables one of them is 0.
    Z's is the Euclidean gradient, before any projection to the tangent space. No ``.grad`` is touched; dropout, if the model
    is in training mode, is drawn once for both.

    Args:
        model: the reference model, or a Hugging Face causal language model.
        ids: (B, N).
        targets: (B, N), the token after each of ids, or ``ignore_index``.

    Raises:
        ValueError: the interface has nothing to train, as where a memory is frozen.
    """
    if targets.shape != ids.shape or ids.ndim != 2:
        raise ValueError(f"expected ids and targets (B, N), got {tuple(ids.shape)} and {tuple(targets.shape)}")
    interface: Any = getattr(model, "interface", None)
    if isinstance(interface, TokenInterface):
        parameters = {f"interface.{name}": p for name, p in interface.named_parameters() if p.requires_grad}
        _check_any(parameters)
        with torch.enable_grad():
            hidden = model.hidden(ids)  # type: ignore[operator]
            fixed = hidden.detach().requires_grad_()
            loss = interface.loss(fixed, targets, ignore_index=ignore_index)
        return _split(parameters, hidden, fixed, loss)
    sides = embedding_and_head(model)
    wanted = {p for side in sides for p in side.parameters() if p.requires_grad}
    parameters = {name: p for name, p in model.named_parameters() if p in wanted}
    _check_any(parameters)
    cut: list[tuple[Tensor, Tensor]] = []

    def detach(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        cut.append((inputs[0], inputs[0].detach().requires_grad_()))
        return (cut[-1][1], *inputs[1:])

    hook = sides[1].register_forward_pre_hook(detach)
    try:
        with torch.enable_grad():
            logits = model(ids, use_cache=False).logits
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), ignore_index=ignore_index
            )
    finally:
        hook.remove()
    if len(cut) != 1:
        raise ValueError(f"expected one call of the head of {type(model).__name__} per forward, got {len(cut)}")
    return _split(parameters, *cut[0], loss)


def _check_any(parameters: dict[str, nn.Parameter]) -> None:
    if not parameters:
        raise ValueError("expected a token interface with trainable parameters, got none: unfreeze its table or memory")


def _split(
    parameters: dict[str, nn.Parameter], hidden: Tensor, fixed: Tensor, loss: Tensor
) -> dict[str, SideGradients]:
    grad: Callable[..., Any] = torch.autograd.grad
    inputs = list(parameters.values())
    through_hidden, *head = grad(loss, [fixed, *inputs], allow_unused=True, materialize_grads=True)
    lookup = grad(hidden, inputs, through_hidden, allow_unused=True, materialize_grads=True)
    return {name: SideGradients(*sides) for name, *sides in zip(parameters, lookup, head, strict=True)}


def gradient_anatomy(sides: SideGradients, counts: Tensor) -> list[BucketGradients]:
    """Norms of the two parts of a table's gradient (V, d), and the angle between them, by token frequency.

    Args:
        sides: of the table or of the memory, from :func:`split_gradient`.
        counts: (V,), how often each token occurs, in the corpus or in the batch.
    """
    if sides.lookup.ndim != 2 or counts.shape != sides.lookup.shape[:1]:
        raise ValueError(
            f"expected gradients of a table (V, d) and counts (V,), got {tuple(sides.lookup.shape)} and {tuple(counts.shape)}"
        )
    result = []
    for bucket, tokens in frequency_buckets(counts):
        lookup, head = sides.lookup[tokens].double(), sides.head[tokens].double()
        norms = torch.linalg.matrix_norm(lookup).item(), torch.linalg.matrix_norm(head).item()
        touched = int((lookup != 0).any(1).sum())
        result.append(
            BucketGradients(
                bucket, len(tokens), touched, *norms, vector_angles(lookup.flatten(), head.flatten()).item()
            )
        )
    return result
