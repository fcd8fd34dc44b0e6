"""Turning the residual stream of a Llama-like model, so that its tied table has orthogonal columns."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_READS = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}  # norm to what reads its output
_PROJECTIONS = {"self_attn": (("q_proj", "k_proj", "v_proj"), "o_proj"), "mlp": (("gate_proj", "up_proj"), "down_proj")}


@dataclass(frozen=True)
class Rotation:
    """Q (d, d), orthogonal; E0 Q, whose columns are orthogonal; and the gain (d,) that the final norm gets."""

    Q: Tensor
    table: Tensor
    gain: Tensor


@torch.no_grad()
def rotation(model: "PreTrainedModel", table: Tensor) -> Rotation:
    """The rotation of the residual stream by which W_out E = I costs a tied model next to nothing; changes nothing yet.

    RMSNorm commutes with an orthogonal Q, so x Q is as good a residual stream as x: what reads it takes Q in, together with
    the gain of the norm before it, and what writes it turns its output. With E0ᵀE0 = H² = Q Λ² Qᵀ and a final norm whose gain
    is one number g, E = E0 Q has orthogonal columns, and the logits norm(x) g E0ᵀ are norm(x Q) (g Λ²) (Λ⁻² Eᵀ): a PIT
    interface with T = Λ⁻¹ behind a final norm with the gain g Λ². Same function, W_out E = I, and no parameter more.

    A final gain diag(g) with different entries is no diagonal matrix any more after the rotation, Qᵀ diag(g) Q. Its diagonal is
    kept, the rest is lost, and is as large as the spread of g: compare the losses before and after.

    Raises:
        ValueError: the blocks are not those of Llama, Qwen, SmolLM, Mistral or Granite: two RMSNorms, each before the
            projections that read it, plain linear layers without constraints or adapters.
    """
    _check_plain(model)
    final = final_norm(model)
    squares, Q = torch.linalg.eigh(table.double().mT @ table.double())
    gain = squares * (Q.mT * final.weight.double() * Q.mT).sum(1)
    return Rotation(Q, (table.double() @ Q).to(table.dtype), gain)


@torch.no_grad()
def rotate_body(model: "PreTrainedModel", by: Rotation) -> None:
    """Turn what reads and writes the residual stream, in place; embedding and head are for the caller to replace.

    They are ``PIT.from_embedding(by.table, transform="embedding")``: a head with the table itself would be off by Λ².
    """
    blocks, final = _parts(model)
    for block in blocks:
        for norm_name, part_name in _READS.items():
            norm, part = getattr(block, norm_name), getattr(block, part_name)
            reads, writes = _PROJECTIONS[part_name]
            for name in reads:
                weight = getattr(part, name).weight
                weight.copy_((weight.double() * norm.weight.double()) @ by.Q)
            norm.weight.fill_(1)
            output = getattr(part, writes)
            output.weight.copy_(by.Q.mT @ output.weight.double())
            if output.bias is not None:
                output.bias.copy_(output.bias.double() @ by.Q)
    final.weight.copy_(by.gain)


def can_rotate(model: "PreTrainedModel") -> bool:
    """Whether :func:`rotation` knows the model's blocks."""
    try:
        _check_plain(model)
    except ValueError:
        return False
    return True


def final_norm(model: "PreTrainedModel") -> Any:
    """The norm before the head; ValueError as for :func:`rotation`."""
    return _parts(model)[1]


def _parts(model: "PreTrainedModel") -> tuple[nn.ModuleList, Any]:
    """The blocks and the final norm; ValueError where something is not as in Llama."""
    body = getattr(model, model.base_model_prefix, None)
    blocks: Any = getattr(body, "layers", None)
    final = getattr(body, "norm", None)
    known = isinstance(blocks, nn.ModuleList) and final is not None and _is_rms_norm(final)
    for block in blocks if known else ():
        norms = [name for name, module in block.named_children() if "norm" in name]
        known &= sorted(norms) == sorted(_READS) and all(_is_rms_norm(getattr(block, name)) for name in norms)
        known &= sorted(name for name, _ in block.named_children() if name not in norms) == ["mlp", "self_attn"]
        for part, (reads, writes) in _PROJECTIONS.items():
            found = {
                name for name, module in getattr(block, part, nn.Module()).named_children() if name.endswith("_proj")
            }
            known &= found == {*reads, writes}
    if not known:
        raise ValueError(
            f"expected blocks as in Llama, two RMSNorms before self_attn and mlp with q, k, v, o, gate, up and down "
            f'projections; {type(model).__name__} has others. Take another transform, "head" or "identity"'
        )
    return blocks, final


def _check_plain(model: "PreTrainedModel") -> None:
    """ValueError unless each projection's weight is a parameter that can be written to, and all that it computes with."""
    other = []
    for name, layer in _parts(model)[0].named_modules():
        if name.endswith("_proj"):
            weight = layer._parameters.get("weight")
            if type(layer) is not nn.Linear or weight is None or weight.is_meta:
                other.append(name)
    if other:
        raise ValueError(
            f"expected plain nn.Linear weights to rotate, but layers {', '.join(other)} of {type(model).__name__} have "
            "constraints or adapters, or are offloaded; call manifold_tying.materialize or merge_and_unload first"
        )


def _is_rms_norm(norm: nn.Module) -> bool:
    """Whether it computes gain x / rms(x), tried on numbers."""
    weight = norm._parameters.get("weight")
    if weight is None or len(norm._parameters) != 1:
        return False
    x = torch.linspace(-1, 2, 4 * len(weight)).reshape(4, -1).to(weight)
    expected: Tensor = weight * x / x.square().mean(-1, keepdim=True).sqrt()
    return torch.allclose(norm(x), expected, rtol=1e-2, atol=1e-3)
