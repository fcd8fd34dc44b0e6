"""The two tables of a language model, and how well embedding and unembedding agree."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying import precision
from manifold_tying.diagnostics.bases import angles_of, basis_product, check_table, polar_scale, table_blocks
from manifold_tying.tying import TokenInterface


def interface_tables(model: nn.Module) -> tuple[Tensor, Tensor]:
    """(E (V, d), W_out (d, V)) of a model, detached.

    The model is a token interface, has one as ``interface`` (the reference model), or follows Hugging Face's protocol,
    ``get_input_embeddings`` and ``get_output_embeddings``. A factor outside the tables (Gemma's √d, Granite's and
    Cohere's multipliers, a bias of the head) is not part of them.
    """
    if (interface := token_interface(model)) is not None:
        return interface.materialize()
    sides = []
    for module in embedding_and_head(model):
        tables = _table(module)
        if isinstance(tables, tuple):
            return tables
        sides.append(tables)
    return sides[0], sides[1].mT


def token_interface(module: nn.Module) -> TokenInterface | None:
    """The token interface that a module is or owns."""
    found = getattr(module, "interface", module)
    return found if isinstance(found, TokenInterface) else None


def embedding_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The modules of a Hugging Face causal language model that read tokens and score them."""
    embedding, head = (_call(model, f"get_{side}_embeddings") for side in ("input", "output"))
    if not isinstance(embedding, nn.Module) or not isinstance(head, nn.Module):
        raise ValueError(
            f"expected a model with a token interface or a Hugging Face causal language model, got {type(model).__name__} "
            "without both get_input_embeddings() and get_output_embeddings(); load it with AutoModelForCausalLM"
        )
    return embedding, head


def _table(module: nn.Module) -> Tensor | tuple[Tensor, Tensor]:
    """What a module computes with: its table (V, d), one row per token as embeddings and linear layers have, or both tables."""
    if (interface := token_interface(module)) is not None:
        return interface.materialize()
    table = _call(module, "materialize")
    if isinstance(table, tuple):
        return table
    table = getattr(module, "weight", None) if table is None else table
    if not isinstance(table, Tensor) or table.ndim != 2:
        raise ValueError(f"expected a module with a table (V, d) as its weight, got {type(module).__name__}")
    return table.detach()


def _call(module: nn.Module, method: str) -> Any:
    """What a method without arguments returns, None where there is none."""
    found: Any = getattr(module, method, None)
    return found() if callable(found) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class InterfaceConsistency:
    """Six numbers about a token interface; zero is perfect agreement in each.

    The paper defines "semantic bases" B_in and B_out twice. In its equations 1 and 2 they are E and W_out⁺, the anchors of
    the tokens; for its tables 2 and 5 it takes the polar factors of E and W_outᵀ (section 5.4). With W_outᵀ = Q H the
    anchors W_out⁺ = Q H⁻¹ have the same polar factor Q, so the second definition cannot tell a transpose from a
    pseudo-inverse: exact transpose tying has zeros there. The first one can.
    """

    delta_ti: float
    """‖W_out E - I‖_F."""
    cosine_distance: float
    """Of polar factors: mean over tokens of 1 - cos between the rows of U and Q. Zero for exact transpose tying."""
    procrustes_error: float
    """Of polar factors: min over orthogonal R of ‖U - Q R‖_F / ‖U‖_F. Zero for exact transpose tying."""
    principal_angle: float
    """The largest angle between the column spaces, radians. By both definitions, as E and W_out⁺ have these column spaces
    too; zero for exact transpose tying."""
    anchor_cosine_distance: float
    """Of anchors: mean over tokens of 1 - cos between the rows of E and W_out⁺."""
    anchor_procrustes_error: float
    """Of anchors: min over orthogonal R of ‖E - W_out⁺ R‖_F / ‖E‖_F."""

    def rows(self) -> list[tuple[str, float, str]]:
        """(quantity, value, what is compared) per number, to be printed."""
        compared = dict.fromkeys(
            ("cosine_distance", "procrustes_error"), "polar factors of E and W_outᵀ (PIT, section 5.4)"
        )
        compared |= {f"anchor_{name}": "E and W_out⁺ (PIT, equations 1 and 2)" for name in compared}
        compared |= {"delta_ti": "W_out E and I (PIT, equation 14)", "principal_angle": "column spaces, by either"}
        return [(field.name, getattr(self, field.name), compared[field.name]) for field in fields(self)]


def interface_consistency(E: Tensor, W_out: Tensor) -> InterfaceConsistency:
    """ΔTI, cosine distance, Procrustes error and principal angle of E (V, d) and W_out (d, V), by both of PIT's definitions.

    Every floating dtype is taken as it is and computed with in float64, a block of rows at a time: O(V d²) operations, and
    beside the tables O(d²) memory and a few blocks. Small angles and errors come from differences, not from cosines: the
    0.002 rad that the paper prints for PIT is what the arc cosine of a float32 cosine gives for zero.

    A token with the zero vector on both sides has cosine distance 0, on one side 1.

    Raises:
        ValueError: shapes that do not fit, V < d, NaN or Inf, or a table without full column rank (below 1e-10).
    """
    _check_shapes(E, W_out)
    check_table(E, "E")
    check_table(W_out.mT, "W_outᵀ")
    A, B = E, W_out.mT
    (H_A, inverse_A), (_, inverse_B) = polar_scale(A, "E"), polar_scale(B, "W_out")
    M = basis_product(A, inverse_A, B, inverse_B)
    # The best rotation comes from the SVD of (W_out⁺)ᵀE = H_B⁻¹ QᵀU H_A.
    left, _, right = torch.linalg.svd(inverse_B @ M.mT @ H_A)
    rotation = left @ right
    gram = torch.zeros_like(M)
    distance, anchor_distance, squares = torch.zeros(3, dtype=torch.float64, device=E.device)
    for a, b in zip(table_blocks(A), table_blocks(B), strict=True):
        u, q = a @ inverse_A, b @ inverse_B
        gram += precision.gram(q - u @ M)
        distance += _cosine_distance(u, q).sum()
        anchors = q @ inverse_B
        anchor_distance += _cosine_distance(a, anchors).sum()
        squares += (a - anchors @ rotation).square().sum()
    angles = angles_of(torch.linalg.svdvals(M), gram)
    V, d = E.shape
    return InterfaceConsistency(
        delta_ti=delta_ti(E, W_out),
        cosine_distance=distance.item() / V,
        # ‖U - Q R‖² = Σ 2 - 2 cos θ_i at the best R
        procrustes_error=(2 * torch.linalg.vector_norm((angles / 2).sin()) / d**0.5).item(),
        principal_angle=angles[-1].item(),
        anchor_cosine_distance=anchor_distance.item() / V,
        anchor_procrustes_error=(squares.sqrt() / torch.linalg.matrix_norm(H_A)).item(),
    )


def delta_ti(E: Tensor, W_out: Tensor) -> float:
    """ΔTI = ‖W_out E - I‖_F of an embedding E (V, d) and an unembedding W_out (d, V), in float64. (PIT, equation 14.)"""
    _check_shapes(E, W_out)
    product = torch.zeros(E.shape[1], E.shape[1], dtype=torch.float64, device=E.device)
    for e, w in zip(table_blocks(E), table_blocks(W_out.mT), strict=True):
        product += w.mT @ e
    return torch.linalg.matrix_norm(product - precision.eye_like(product)).item()


def _check_shapes(E: Tensor, W_out: Tensor) -> None:
    if E.ndim != 2 or W_out.shape != E.shape[::-1]:
        raise ValueError(f"expected E (V, d) and W_out (d, V), got {tuple(E.shape)} and {tuple(W_out.shape)}")


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """1 - cos of the rows of a and b, (n, d) to (n,), as half the squared distance of unit vectors: exact near 0."""
    norms = torch.linalg.vector_norm(a, dim=1), torch.linalg.vector_norm(b, dim=1)
    units = [rows / torch.where(norm == 0, 1, norm)[:, None] for rows, norm in zip((a, b), norms, strict=True)]
    none = (norms[0] == 0) | (norms[1] == 0)
    return torch.where(none, (norms[0] != norms[1]).double(), (units[0] - units[1]).square().sum(1) / 2)
