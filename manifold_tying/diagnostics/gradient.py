"""Split the gradient of a token table by source: the lookup (as embedding) and the head (as unembedding)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying.diagnostics.interface import embedding_and_head
from manifold_tying.tying import TokenInterface


@dataclass(frozen=True, slots=True)
class SideGradients:
    """The two terms of ∂ℓ/∂θ = lookup + head for one parameter of the token interface, detached."""

    lookup: Tensor
    """Through the embeddings. If θ is a table or Z, only the rows of the batch's tokens are non-zero; a free PIT table W also
    enters by WᵀW, so all are."""
    head: Tensor
    """Through the logits, with hidden states held fixed. Non-zero for every token, since each has a probability."""


def split_gradient(
    model: nn.Module, ids: Tensor, targets: Tensor, *, ignore_index: int = -100
) -> dict[str, SideGradients]:
    """The gradient of the mean cross-entropy, split by side, for each trainable parameter of the token interface, by name.

    Let h be the hidden states that the head multiplies. Then head = ∂ℓ/∂θ at fixed h, and lookup = (∂ℓ/∂h) (∂h/∂θ), since h
    depends on θ only through the embeddings. This takes two backward passes and is exact for every interface. Transpose tying
    has a sparse and a dense term for its table, PIT has both terms for Z and for L, and untied tables have one each. Z's
    gradient is Euclidean, not projected to the tangent space. ``.grad`` does not change. In training mode, both passes share
    one dropout mask.

    Args:
        model: the reference model, or a Hugging Face causal language model.
        ids: (B, N).
        targets: (B, N), the token after each of ids, or ``ignore_index``.

    Raises:
        ValueError: the interface has no trainable parameters, for example because its memory is frozen.
    """
    if targets.shape != ids.shape or ids.ndim != 2:
        raise ValueError(f"expected ids and targets (B, N), got {tuple(ids.shape)} and {tuple(targets.shape)}")
    interface: Any = getattr(model, "interface", None)
    ours = isinstance(interface, TokenInterface)
    embedding, head = (interface, interface) if ours else embedding_and_head(model)
    wanted = {p for side in (embedding, head) for p in side.parameters() if p.requires_grad}
    if not wanted:
        raise ValueError("expected a token interface with trainable parameters, got none: unfreeze its table or memory")
    parameters = {name: p for name, p in model.named_parameters() if p in wanted}
    with torch.enable_grad():
        if ours:
            hidden = model.hidden(ids)  # type: ignore[operator]
            fixed = hidden.detach().requires_grad_()
            loss = interface.loss(fixed, targets, ignore_index=ignore_index)
        else:
            hidden, fixed, loss = _hugging_face(model, head, ids, targets, ignore_index)
    inputs = list(parameters.values())
    through_hidden, *by_head = torch.autograd.grad(loss, [fixed, *inputs], allow_unused=True, materialize_grads=True)
    by_lookup: Sequence[Tensor] = [torch.zeros_like(p) for p in inputs]
    if hidden.requires_grad:  # unless the head alone trains
        by_lookup = torch.autograd.grad(hidden, inputs, through_hidden, allow_unused=True, materialize_grads=True)
    return {name: SideGradients(*terms) for name, *terms in zip(parameters, by_lookup, by_head, strict=True)}


def _hugging_face(
    model: nn.Module, head: nn.Module, ids: Tensor, targets: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The head's input, a detached copy that the head reads instead, and the loss."""
    cut: list[tuple[Tensor, Tensor]] = []

    def detach(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        cut.append((inputs[0], inputs[0].detach().requires_grad_()))
        return (cut[-1][1], *inputs[1:])

    hook = head.register_forward_pre_hook(detach)
    try:
        logits = model(ids, use_cache=False).logits.flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index)
    finally:
        hook.remove()
    if len(cut) != 1:
        raise ValueError(f"expected one call of the head of {type(model).__name__} per forward, got {len(cut)}")
    return *cut[0], loss
