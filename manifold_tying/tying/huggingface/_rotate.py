"""Turning the residual stream of a Llama-like model, so that its tied table has orthogonal columns."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manifold_tying.tying.huggingface._probe import random_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_READS = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}  # norm to what reads its output
_PROJECTIONS = {"self_attn": (("q_proj", "k_proj", "v_proj"), "o_proj"), "mlp": (("gate_proj", "up_proj"), "down_proj")}

BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest relative difference of logits (Frobenius). Rounding: 8e-7 (float32), 4e-3, 3e-2; what does not turn: about 1."""

Changes = list[tuple[nn.Parameter, Tensor]]
"""Parameters that got new data, and the data they had."""


@dataclass(frozen=True)
class Rotation:
    """Q (d, d), orthogonal; E0 Q with orthogonal columns, and their squared norms; the gain (d,) that the final norm gets."""

    Q: Tensor
    table: Tensor
    squares: Tensor
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
            projections that read it, plain linear layers without constraints or adapters; or the model's dtype cannot
            hold the new gain.
    """
    _check_plain(model)
    final = final_norm(model)
    squares, Q = torch.linalg.eigh(table.double().mT @ table.double())
    gain = squares * (Q.mT * final.weight.double() * Q.mT).sum(1)
    if not torch.isfinite(gain.to(final.weight.dtype)).all():
        raise ValueError(
            f"expected a final gain that {final.weight.dtype} can hold, but transform='rotation' makes one up to "
            f"{float(gain.abs().max()):.0f}; convert in torch.bfloat16 or torch.float32, model.to(torch.bfloat16)"
        )
    return Rotation(Q, (table.double() @ Q).to(table.dtype), squares, gain)


def logits_with_gain(model: "PreTrainedModel", gain: Tensor | float) -> Tensor:
    """Logits of random tokens with ``gain`` in the final norm, in float64; ValueError where the model does not run on them."""
    final = final_norm(model).weight
    before = final.data
    final.data = torch.zeros_like(before).add_(gain)
    try:
        return model(input_ids=random_ids(model)).logits.double()
    except Exception as error:
        raise ValueError(
            f"transform='rotation' is checked by the logits of a few token ids, but {type(model).__name__} does not run on "
            f"them: {error}. Choose another transform"
        ) from error
    finally:
        final.data = before


def check_rotated(model: "PreTrainedModel", by: Rotation, reference: Tensor) -> None:
    """ValueError unless the rotated model has the logits that it had; both with an even gain, for which it is exact."""
    error = logits_with_gain(model, by.squares * even_gain(by)) - reference
    relative = float(error.norm() / reference.norm())
    bound = BOUNDS.get(final_norm(model).weight.dtype, BOUNDS[torch.bfloat16])
    if not relative <= bound:
        raise ValueError(
            f"expected logits within {bound:g} of the model's own after transform='rotation' (relative, on random tokens), got "
            f"{relative:.2g}: {type(model).__name__} computes with the residual stream in a way that does not turn with it, "
            'for instance between the final norm and the head. Choose another transform, "head" or "identity"'
        )
    if not torch.isfinite(logits_with_gain(model, by.gain)).all():
        raise ValueError(
            f"transform='rotation' makes activations that {final_norm(model).weight.dtype} cannot hold; convert in "
            "torch.bfloat16 or torch.float32"
        )


def even_gain(by: Rotation) -> float:
    """One gain for all entries, about the size of the true one, so that the check computes in the same range."""
    return float(by.gain.abs().max() / by.squares.max())


@torch.no_grad()
def rotate_body(model: "PreTrainedModel", by: Rotation, changes: Changes) -> None:
    """Turn what reads and writes the residual stream; embedding and head are for the caller to replace.

    The old data of every parameter go to ``changes``, see :func:`undo`. Embedding and head are
    ``PIT.from_embedding(by.table, transform="embedding")``: a head with the table itself would be off by Λ².
    """
    blocks, final = _parts(model)

    def change(parameter: nn.Parameter, value: Tensor) -> None:
        changes.append((parameter, parameter.data))
        parameter.data = value.to(parameter.dtype)

    for block in blocks:
        for norm_name, part_name in _READS.items():
            norm, part = getattr(block, norm_name), getattr(block, part_name)
            reads, writes = _PROJECTIONS[part_name]
            for name in reads:
                weight = getattr(part, name).weight
                change(weight, (weight.double() * norm.weight.double()) @ by.Q)
            change(norm.weight, torch.ones_like(norm.weight))
            output = getattr(part, writes)
            change(output.weight, by.Q.mT @ output.weight.double())
            if output.bias is not None:
                change(output.bias, output.bias.double() @ by.Q)
    change(final.weight, by.gain)


def undo(changes: Changes) -> None:
    """The data that the parameters had."""
    while changes:
        parameter, data = changes.pop()
        parameter.data = data


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
