"""Measure how well the embedding and the unembedding of a language model agree."""

from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying import precision
from manifold_tying.diagnostics.bases import check_table, normalized, polar_scale, table_blocks
from manifold_tying.tying import TokenInterface


def interface_tables(model: nn.Module) -> tuple[Tensor, Tensor]:
    """(E (V, d), W_out (d, V)) of a model, detached.

    The model is a token interface, has one as ``interface`` (the reference model), or follows Hugging Face's protocol,
    ``get_input_embeddings`` and ``get_output_embeddings``. Factors outside the tables are not included: Gemma's √d,
    Granite's and Cohere's multipliers, the head's bias.
    """
    sides = []
    for module in (model,) if _token_interface(model) else embedding_and_head(model):
        tables = _call(_token_interface(module) or module, "materialize")
        if isinstance(tables, tuple):
            return tables
        table = getattr(module, "weight", None) if tables is None else tables
        if not isinstance(table, Tensor) or table.ndim != 2:
            raise ValueError(f"expected a module with a table (V, d) as its weight, got {type(module).__name__}")
        sides.append(table.detach())
    return sides[0], sides[1].mT


def _token_interface(module: nn.Module) -> TokenInterface | None:
    """The token interface that a module is or owns."""
    found = getattr(module, "interface", module)
    return found if isinstance(found, TokenInterface) else None


def embedding_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The embedding and the head of a Hugging Face causal language model."""
    embedding, head = (_call(model, f"get_{side}_embeddings") for side in ("input", "output"))
    if not isinstance(embedding, nn.Module) or not isinstance(head, nn.Module):
        raise ValueError(
            f"expected a model with a token interface or a Hugging Face causal language model, got {type(model).__name__} "
            "without both get_input_embeddings() and get_output_embeddings(); load it with AutoModelForCausalLM"
        )
    return embedding, head


def _call(module: nn.Module, method: str) -> Any:
    """The result of a method without arguments; None if the module lacks it, or has only transformers' placeholder."""
    found: Any = getattr(module, method, None)
    with suppress(NotImplementedError):
        return found() if callable(found) else None
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class InterfaceConsistency:
    """Six measures of a token interface, each zero for perfect agreement.

    The paper defines "semantic bases" B_in and B_out twice. In its equations 1 and 2 they are the anchors E and W_out⁺. For its
    tables 2 and 5 they are the polar factors U of E and Q of W_outᵀ (section 5.4). With W_outᵀ = Q H, the anchors
    W_out⁺ = Q H⁻¹ also have the polar factor Q. So the second definition cannot tell a transpose from a pseudo-inverse: it is
    zero for exact transpose tying. The first definition can.
    """

    delta_ti: float
    """‖W_out E - I‖_F."""
    cosine_distance: float
    """Polar factors: mean over tokens of 1 - cos between the rows of U and Q. Zero for exact transpose tying."""
    procrustes_error: float
    """Polar factors: min over orthogonal R of ‖U - Q R‖_F / ‖U‖_F. Zero for exact transpose tying."""
    principal_angle: float
    """Largest angle between the column spaces in radians; the same by both definitions. Zero for exact transpose tying."""
    anchor_cosine_distance: float
    """Anchors: mean over tokens of 1 - cos between the rows of E and W_out⁺."""
    anchor_procrustes_error: float
    """Anchors: min over orthogonal R of ‖E - W_out⁺ R‖_F / ‖E‖_F."""

    def rows(self) -> list[tuple[str, float, str]]:
        """(quantity, value, what is compared) for each measure, for printing."""
        polar = "polar factors of E and W_outᵀ (PIT, section 5.4)"
        compared = dict.fromkeys(("cosine_distance", "procrustes_error"), polar)
        compared |= {f"anchor_{name}": "E and W_out⁺ (PIT, equations 1 and 2)" for name in compared}
        compared |= {"delta_ti": "W_out E and I (PIT, equation 14)", "principal_angle": "column spaces, by either"}
        return [(field.name, getattr(self, field.name), compared[field.name]) for field in fields(self)]


def interface_consistency(E: Tensor, W_out: Tensor) -> InterfaceConsistency:
    """ΔTI, cosine distance, Procrustes error and principal angle of E (V, d) and W_out (d, V), by both of PIT's definitions.

    Accepts any floating dtype and computes in float64, one block of rows at a time: O(V d²) operations and, besides the tables,
    O(d²) memory and a few blocks. Small angles and errors come from differences, not cosines: the 0.002 rad that the paper
    prints for PIT is the arc cosine of a float32 cosine at angle zero.

    A token that is zero on both sides has cosine distance 0, on one side 1.

    Raises:
        ValueError: the shapes do not match, V < d, an entry is NaN or Inf, or a table lacks full column rank (smallest over
            largest singular value at most 1e-10).
    """
    _check_shapes(E, W_out)
    A, B = E, W_out.mT
    check_table(A, "E")
    check_table(B, "W_outᵀ")
    (H_A, inverse_A), (_, inverse_B) = polar_scale(A, "E"), polar_scale(B, "W_out")
    M = torch.zeros_like(inverse_A)  # UᵀQ of the orthonormal bases
    for a, b in zip(table_blocks(A), table_blocks(B), strict=True):
        M += (a @ inverse_A).mT @ (b @ inverse_B)
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
    # Their cosines lose angles below √eps, their sines those within √eps of π/2. (Björck and Golub 1973.)
    angles = torch.atan2(torch.linalg.eigvalsh(gram).clamp_min(0).sqrt(), torch.linalg.svdvals(M))
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
    return float(torch.linalg.matrix_norm(product - precision.eye_like(product)))


def _check_shapes(E: Tensor, W_out: Tensor) -> None:
    if E.ndim != 2 or W_out.shape != E.shape[::-1]:
        raise ValueError(f"expected E (V, d) and W_out (d, V), got {tuple(E.shape)} and {tuple(W_out.shape)}")


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """1 - cos of the rows of a and b, (n, d) to (n,), as half the squared distance of unit vectors: accurate near 0."""
    a, b = normalized(a), normalized(b)
    return torch.where(a.any(1) == b.any(1), (a - b).square().sum(1) / 2, 1.0)
