"""Rotate the residual stream, and the learning rates that follow from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manifold_tying import linalg
from manifold_tying.huggingface.native import pit_embedding
from manifold_tying.huggingface.tables import random_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_READS = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}  # norm -> module that reads its output
_PROJECTIONS = {"self_attn": (("q_proj", "k_proj", "v_proj"), "o_proj"), "mlp": (("gate_proj", "up_proj"), "down_proj")}

BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Bounds on the relative error of logits (Frobenius). Rounding: 8e-7 (float32), 4e-3, 3e-2; an unrotated part: about 1."""


@dataclass(frozen=True)
class Rotation:
    """Orthogonal Q (d, d); table E0 Q with orthogonal columns; their squared norms; new gain (d,) of the final norm."""

    Q: Tensor
    table: Tensor
    squares: Tensor
    gain: Tensor


@torch.no_grad()
def rotation(model: "PreTrainedModel", table: Tensor) -> Rotation:
    """Compute the rotation of the residual stream that gives a tied model W_out E = I at almost no cost. Changes nothing yet.

    RMSNorm commutes with an orthogonal Q, so x can be replaced by x Q. Layers that read it absorb Q and the gain of the norm
    before them; layers that write it rotate their output. Let E0ᵀE0 = H² = Q Λ² Qᵀ, and let the final norm have a scalar gain
    g. Then E = E0 Q has orthogonal columns, and the logits norm(x) g E0ᵀ equal norm(x Q) (g Λ²) (Λ⁻² Eᵀ). This is a PIT
    interface with T = Λ⁻¹ after a final norm with gain g Λ²: the same function, W_out E = I, and no extra parameters.

    If the gain diag(g) has different entries, Qᵀ diag(g) Q is not diagonal. The rotation keeps its diagonal and loses the rest,
    which is as large as the spread of g: compare the losses before and after.

    Raises:
        ValueError: the blocks differ from those of Llama, Qwen, SmolLM, Mistral or Granite (two RMSNorms, each followed by
            its projections, all plain linear layers without constraints or adapters), or the model's dtype cannot hold the
            new gain.
    """
    check_plain(model)
    final = final_norm(model)
    squares, Q = torch.linalg.eigh(table.double().mT @ table.double())
    gain = squares * (Q.mT * final.weight.double() * Q.mT).sum(1)
    if not torch.isfinite(gain.to(final.weight.dtype)).all():
        raise ValueError(
            f"transform='rotation' needs a final gain of {float(gain.abs().max()):.0f}, too large for {final.weight.dtype}; "
            "convert in torch.bfloat16 or torch.float32, for instance with model.to(torch.bfloat16)"
        )
    return Rotation(Q, (table.double() @ Q).to(table.dtype), squares, gain)


def rotate(model: "PreTrainedModel", by: Rotation, install: Callable[[], None]) -> None:
    """Rotate the body, and ``install`` embedding and head; ValueError if the logits do not stay.

    Compares them with an even gain, for which the rotation is exact, of about the true gain's size, to stay in its range.
    """
    even = float(by.gain.abs().max() / by.squares.max())
    reference = _logits_with_gain(model, even)
    install()
    _rotate_body(model, by)
    dtype, error = final_norm(model).weight.dtype, _logits_with_gain(model, by.squares * even) - reference
    relative = float(error.norm() / reference.norm())
    bound = BOUNDS.get(dtype, BOUNDS[torch.bfloat16])
    if not relative <= bound:
        raise ValueError(
            f"expected transform='rotation' to change logits by at most {bound:g} (relative, on random tokens), got "
            f"{relative:.2g}: {type(model).__name__} uses the residual stream where it cannot be rotated, for instance "
            'between the final norm and the head. Choose transform="head" or "identity"'
        )
    if not torch.isfinite(_logits_with_gain(model, by.gain)).all():
        raise ValueError(f"transform='rotation' makes activations overflow {dtype}; convert in bfloat16 or float32")


def _logits_with_gain(model: "PreTrainedModel", gain: Tensor | float) -> Tensor:
    """Logits on random tokens with ``gain`` in the final norm, in float64; ValueError if the model does not run on them."""
    final = final_norm(model).weight
    before = final.data
    final.data = torch.zeros_like(before).add_(gain)
    try:
        logits: Tensor = model(input_ids=random_ids(model)).logits
        return logits.double()
    except Exception as error:
        raise ValueError(
            f"transform='rotation' is checked on a few token ids, but {type(model).__name__} does not run on them: {error}. "
            "Choose another transform"
        ) from error
    finally:
        final.data = before


@torch.no_grad()
def _rotate_body(model: "PreTrainedModel", by: Rotation) -> None:
    """Rotate all layers that read or write the residual stream; the caller replaces the embedding and head.

    Embedding and head must be ``PIT.from_embedding(by.table, transform="embedding")``; a head that used the table itself would
    be off by Λ².
    """
    blocks, final = _parts(model)

    def change(parameter: nn.Parameter, value: Tensor) -> None:
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


def final_norm(model: "PreTrainedModel") -> Any:
    """The norm before the head; ValueError as for :func:`rotation`."""
    return _parts(model)[1]


def _parts(model: "PreTrainedModel") -> tuple[nn.ModuleList, Any]:
    """The blocks and the final norm; ValueError for other names than Llama's. :func:`rotate` tests the rest."""
    body = getattr(model, model.base_model_prefix, None)
    blocks: Any = getattr(body, "layers", None)
    final = getattr(body, "norm", None)
    known = isinstance(blocks, nn.ModuleList) and hasattr(final, "weight")
    for block in blocks if known else ():
        children = {name for name, _ in block.named_children()}
        known &= {name for name in children if "norm" in name} == _READS.keys() and set(_PROJECTIONS) <= children
        for part, (reads, writes) in _PROJECTIONS.items():
            known &= {*reads, writes} <= {name for name, _ in getattr(block, part, nn.Module()).named_children()}
    if not known:
        raise ValueError(
            f"expected Llama-like blocks: two RMSNorms before self_attn and mlp with q, k, v, o, gate, up and down "
            f'projections; {type(model).__name__} has others. Choose transform="head" or "identity"'
        )
    return blocks, final


def check_plain(model: "PreTrainedModel") -> None:
    """ValueError unless the blocks are Llama-like and every projection is a plain ``nn.Linear`` with a weight in memory."""
    other = [
        name
        for name, layer in _parts(model)[0].named_modules()
        if name.endswith("_proj")
        and (type(layer) is not nn.Linear or "weight" not in layer._parameters or layer.weight.is_meta)
    ]
    if other:
        raise ValueError(
            f"expected plain nn.Linear weights to rotate, but layers {', '.join(other)} of {type(model).__name__} have "
            "constraints or adapters, or are offloaded; call manifold_tying.materialize or merge_and_unload first"
        )


@torch.no_grad()
def rotation_scales(model: "PreTrainedModel") -> dict[str, dict[str, Tensor | float]]:
    """Overrides for ``param_groups`` that give a model converted with transform="rotation" the steps of a plain table.

    Adam moves every entry of a tied table by about its learning rate. With T = diag(t) it moves column j of E = W T⁻² by t_j⁻²
    times that, for a fixed T. t spans the condition number of the table, so no single rate suits all columns. The updates of
    W's column j are multiplied by t_j². Likewise the update of the final norm's gain, g / t², is multiplied by 1 / t². Training
    makes T non-diagonal; t is then its diagonal.

        groups = param_groups(model, overrides=rotation_scales(model))
        optimizer = RiemannianAdam(groups, lr=1e-3)

    Returns:
        For each full parameter name: {"scale": factors of its updates, "weight_decay": 0.0}.

    Raises:
        ValueError: the model is not converted, or was converted with another transform.
    """
    W = pit_embedding(model).weight
    if not model.config.manifold_tying["rotated"]:
        raise ValueError("expected a model converted with transform='rotation'; other models need no scales")
    squares = linalg.polar(W.double())[1].diagonal().to(W.dtype) ** 2
    scales: dict[Tensor, Tensor] = {final_norm(model).weight: 1 / squares, W: squares.expand_as(W)}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: {"scale": scale, "weight_decay": 0.0} for parameter, scale in scales.items()}
