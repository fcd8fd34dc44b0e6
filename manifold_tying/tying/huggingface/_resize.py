"""Resize the vocabulary of a converted model while preserving ZᵀZ = I."""

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manifold_tying import linalg
from manifold_tying.parametrizations import parametrized
from manifold_tying.tying._free_pit import FreePIT
from manifold_tying.tying._pit import PIT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from manifold_tying.tying.huggingface._modules import PITEmbedding


def resize_token_embeddings(
    model: "PreTrainedModel",
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> "PITEmbedding":
    """``resize_token_embeddings`` of a converted model: truncate or extend Z to Y, then Z' = Y (YᵀY)^(-1/2).

    T (and a bridge) do not change, so every embedding and logit moves by the deviation of YᵀY from I. With a free table only
    the embeddings move. A warning reports by how much. This is unavoidable, because W_out E = I couples all rows. The head's
    bias is truncated or padded with zeros.

    Args:
        model: a model converted by :func:`manifold_tying.convert`; changed in place.
        new_num_tokens: the new V; None keeps the current one.
        pad_to_multiple_of: round V up to a multiple of this.
        mean_resizing: if True, each new row is the mean row of Z or W (all new rows are equal, so train them); if False,
            Gaussian with the mean square of the old rows.

    Returns:
        The new embedding.
    """
    from manifold_tying.tying.huggingface._install import halves, install, interface_options, make_halves

    embedding, head = halves(model)
    old = embedding.interface
    V = old.vocab_size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        V = -(-V // pad_to_multiple_of) * pad_to_multiple_of
    if V == old.vocab_size:
        return embedding
    if V < old.hidden_size:
        raise ValueError(f"expected at least d = {old.hidden_size} tokens, because ZᵀZ = I needs V >= d; got {V}")
    new = _resized(old, V, interface_options(old), mean_resizing, embedding.weight.dtype)
    bias = None if head.bias is None else _padded(head.bias, V)
    padding_idx = embedding.padding_idx if embedding.padding_idx is not None and embedding.padding_idx < V else None
    dtype, scale, rotated = embedding.weight.dtype, embedding.scale, embedding.rotated
    install(model, *make_halves(new, dtype, scale=scale, padding_idx=padding_idx, bias=bias, rotated=rotated))
    for module in model.modules() if bias is not None else ():
        for name, parameter in module._parameters.items():
            if parameter is head.bias:  # RoBERTa registers it twice
                module._parameters[name] = bias
    model.config.get_text_config().vocab_size = V
    model.vocab_size = V
    unchanged = "Logits" if isinstance(new, FreePIT) else "T"
    warnings.warn(
        f"vocabulary {old.vocab_size} -> {V}: rows were {'appended' if V > old.vocab_size else 'removed'}. W_out E = I couples "
        f"all rows, so the embeddings of the remaining tokens moved by {_moved(old, new):.1e} of their norm. {unchanged} and "
        "the body did not change",
        stacklevel=2,
    )
    return halves(model)[0]


@torch.no_grad()
def _resized(old: PIT, V: int, options: dict, mean_resizing: bool, dtype: torch.dtype) -> PIT:
    Z = old._table().double()
    if V < old.vocab_size:
        Y = Z[:V]
        squares = torch.linalg.eigvalsh(linalg.gram(Y))
        smallest = (squares[0].clamp_min(0) / squares[-1]).sqrt()
        if not smallest > 1e-5:
            raise ValueError(
                f"cannot truncate the vocabulary to {V}: the remaining rows do not span the hidden space (smallest / largest "
                f"singular value {smallest:.0e}), so ZᵀZ = I is impossible; keep more tokens"
            )
    else:
        added = V - old.vocab_size
        rows = (
            Z.mean(0).expand(added, -1)
            if mean_resizing
            else torch.randn_like(Z[:1].expand(added, -1)) * Z.square().mean().sqrt()
        )
        Y = torch.cat([Z, rows])
    new = PIT(V, old.hidden_size, **options).to(Z.device, old._table().dtype)
    if isinstance(new, FreePIT):
        new.table.copy_(Y).requires_grad_(old._table().requires_grad)
    else:
        new.memory = linalg.polar(Y)[0].to(old.memory.dtype)
        new.cholesky_factor = old.cholesky_factor
        factors = [parametrized(pit)["cholesky_factor"].original for pit in (old, new)]
        factors[1].requires_grad_(factors[0].requires_grad)
    if old.bridge is not None:
        new.bridge = old.bridge
    return new.to(dtype)


def _padded(bias: nn.Parameter, V: int) -> nn.Parameter:
    values = torch.zeros(V, dtype=bias.dtype, device=bias.device)
    values[: len(bias)] = bias.detach()[:V]
    return nn.Parameter(values, requires_grad=bias.requires_grad)


@torch.no_grad()
def _moved(old: PIT, new: PIT) -> float:
    n = min(old.vocab_size, new.vocab_size)
    ids = torch.arange(n, device=old._table().device)
    before: Tensor = old.embed(ids).double()
    return float((new.embed(ids) - before).norm() / before.norm())
