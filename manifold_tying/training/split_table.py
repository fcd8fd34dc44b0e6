"""The table W of a converted model as a memory Z and a transform T, in the model's place of embedding and head."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manifold_tying.huggingface.native import pit_embedding
from manifold_tying.huggingface.rotation import final_norm
from manifold_tying.parametrizations import parametrized
from manifold_tying.tying import PIT, ManifoldPIT, PITEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MemoryEmbedding(nn.Module):
    """Token ids (...) to scale · z T⁻¹ (..., d). A padding row gets no gradient from its lookup."""

    def __init__(self, interface: ManifoldPIT, native: PITEmbedding) -> None:
        super().__init__()
        self.interface = interface
        self.scale, self.padding_idx = native.scale, native.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        e: Tensor = self.interface(ids)
        if self.padding_idx is not None and torch.is_grad_enabled():
            e = torch.where((ids == self.padding_idx)[..., None], e.detach(), e)
        return e if self.scale == 1.0 else e * self.scale


class MemoryHead(nn.Module):
    """Hidden states (..., d) to h T Zᵀ + bias (..., V)."""

    def __init__(self, interface: ManifoldPIT, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.interface, self.bias = interface, bias

    @property
    def weight(self) -> Tensor:
        """W_outᵀ (V, d); Mamba reads its dtype."""
        return self.interface.head_weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.interface(hidden, head=True)
        return logits if self.bias is None else logits + self.bias


class SplitTable:
    """The table W of a converted model as a memory Z and T with W = Z T, in the model until :meth:`join`.

    ``options`` of :class:`manifold_tying.PIT` make the memory.
    """

    def __init__(self, model: "PreTrainedModel", **options: Any) -> None:
        embedding, head = self._native = pit_embedding(model), model.get_output_embeddings()
        interface = PIT.from_embedding(embedding.weight, transform="head", **options)
        assert isinstance(interface, ManifoldPIT)
        self.interface, self._rotated = interface, model.config.manifold_tying["rotated"]
        model.set_input_embeddings(MemoryEmbedding(interface, embedding))
        model.set_output_embeddings(MemoryHead(interface, getattr(head, "bias", None)))

    @torch.no_grad()
    def join(self, model: "PreTrainedModel") -> None:
        """Put the converted model's own modules back, with W = Z T."""
        embedding, head = self._native
        embedding.weight.copy_(self.interface.head_weight)
        model.set_input_embeddings(embedding)
        model.set_output_embeddings(head)

    @torch.no_grad()
    def rotation_scales(self, model: "PreTrainedModel") -> dict[str, dict[str, Any]]:
        """:func:`manifold_tying.huggingface.rotation_scales` for Z and L; empty unless the residual stream was rotated.

        With T = diag(t), the update of Z's column j is multiplied by t_j, so that E = Z T⁻¹ moves as a plain table would. The
        update of L_ij is multiplied by t_i √t_j, that of the stored diagonal by t_j (its map already multiplies by about √t_j),
        and that of the final norm's gain, g / t², by 1 / t².
        """
        if not self._rotated:
            return {}
        t, stored = self.interface.transform.diagonal().clone(), parametrized(self.interface)
        scales = {
            final_norm(model).weight: t**-2,
            stored["memory"].original: t,
            stored["cholesky_factor"].original: (t[:, None] * t.sqrt()).tril(-1) + torch.diag(t),
        }
        names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
        return {names[parameter]: {"scale": scale, "weight_decay": 0.0} for parameter, scale in scales.items()}
