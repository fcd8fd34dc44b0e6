"""Turning the residual stream of a Llama-like model, so that its tied table has orthogonal columns."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manifold_tying.tying.huggingface._tables import read_tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_READS = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}  # norm to what reads its output
_PROJECTIONS = {"self_attn": (("q_proj", "k_proj", "v_proj"), "o_proj"), "mlp": (("gate_proj", "up_proj"), "down_proj")}


@torch.no_grad()
def rotate_residual_stream(model: "PreTrainedModel") -> None:
    """Bring a tied model into a form in which W_out E = I costs it next to nothing; in place.

    RMSNorm commutes with an orthogonal Q, so x Q is as good a residual stream as x: what reads it takes Q in, together with
    the gain of the norm before it, and what writes it turns its output. With E0ᵀE0 = H² = Q Λ² Qᵀ and a final norm whose gain
    is one number g, E = E0 Q has orthogonal columns, and the logits norm(x) g E0ᵀ are norm(x Q) (g Λ²) (Λ⁻² Eᵀ): a PIT
    interface with T = Λ⁻¹ behind a final norm with the gain g Λ². Same function, W_out E = I, and no parameter more.

    A final gain diag(g) with different entries is no diagonal matrix any more after the rotation, Qᵀ diag(g) Q. Its diagonal is
    kept, the rest is lost, and is as large as the spread of g: compare the losses before and after.

    The head of the model is off by Λ² from here on, until ``PIT.from_embedding(..., transform="embedding")`` takes its place.

    Raises:
        ValueError: the blocks are not those of Llama, Qwen, SmolLM, Mistral or Granite: two RMSNorms, each before the
            projections that read it. The model is as it was then.
    """
    blocks, final = _parts(model)
    table = read_tables(model).weight
    squares, Q = torch.linalg.eigh(table.double().mT @ table.double())
    gain = squares * (Q.mT * final.weight.double() * Q.mT).sum(1)
    table.copy_(table.double() @ Q)
    for block in blocks:
        for norm_name, part_name in _READS.items():
            norm, part = getattr(block, norm_name), getattr(block, part_name)
            reads, writes = _PROJECTIONS[part_name]
            for name in reads:
                weight = getattr(part, name).weight
                weight.copy_((weight.double() * norm.weight.double()) @ Q)
            norm.weight.fill_(1)
            output = getattr(part, writes)
            output.weight.copy_(Q.mT @ output.weight.double())
            if output.bias is not None:
                output.bias.copy_(output.bias.double() @ Q)
    final.weight.copy_(gain)


def can_rotate(model: "PreTrainedModel") -> bool:
    """Whether :func:`rotate_residual_stream` knows the model's blocks."""
    try:
        _parts(model)
    except ValueError:
        return False
    return True


def final_norm(model: "PreTrainedModel") -> Any:
    """The norm before the head; ValueError as for :func:`rotate_residual_stream`."""
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


def _is_rms_norm(norm: nn.Module) -> bool:
    """Whether it computes gain x / rms(x), tried on numbers."""
    weight = norm._parameters.get("weight")
    if weight is None or len(norm._parameters) != 1:
        return False
    x = torch.linspace(-1, 2, 4 * len(weight)).reshape(4, -1).to(weight)
    expected: Tensor = weight * x / x.square().mean(-1, keepdim=True).sqrt()
    return torch.allclose(norm(x), expected, rtol=1e-2, atol=1e-3)
