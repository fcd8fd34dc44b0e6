"""PIT in two ordinary modules: an embedding whose rows are divided, and a plain head with the same weight."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from manifold_tying import distributed, kernels, precision
from manifold_tying.tying._free_pit import FreePIT
from manifold_tying.tying._pseudo_inverse import InverseGram, divide
from manifold_tying.tying._vocabulary import check_ids, distinct_rows


class PITEmbedding(nn.Embedding):
    """Token ids (...) to rows of E = W (WᵀW)⁻¹, (..., d), where ``weight``, W (V, d), is also the weight of the head.

    The head is any module that computes h Wᵀ, and shares the parameter as in transpose tying. So W_out E = WᵀE = I:

        embedding, head = PITEmbedding(V, d), nn.Linear(d, V, bias=False)
        head.weight = embedding.weight

    Every W of full column rank has unique polar factors W = Z T, so this pair is PIT (section 4) with E = Z T⁻¹ and
    W_out = T Zᵀ. Any optimizer trains W. E is computed, rounded to the dtype of W and cached as by :class:`FreePIT`.

    Args:
        num_embeddings: V >= d.
        embedding_dim: d.
        padding_idx: a token whose lookup passes no gradient.
        scale: factor of the result, as Gemma's √d; it takes no part in W_out E = I.
        device: of ``weight``.
        dtype: of ``weight``.

    Raises:
        ValueError: num_embeddings < embedding_dim; in ``forward``, if W is rank-deficient (on a GPU the result is NaN).
    """

    scale: float

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_embeddings < embedding_dim:
            raise ValueError(
                f"expected num_embeddings >= embedding_dim, since W needs full column rank; got V={num_embeddings}, "
                f"d={embedding_dim}"
            )
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.scale, self._inverse = scale, InverseGram()

    @classmethod
    def adopt(cls, embedding: nn.Embedding, scale: float = 1.0) -> Self:
        """Turn an embedding into one of this class in place; its weight, hooks and names stay."""
        embedding.__class__ = cls
        assert isinstance(embedding, cls)
        embedding.scale, embedding._inverse = scale, InverseGram()
        return embedding

    @property
    def max_norm(self) -> None:
        """Always raises: code that reads it, as PEFT's adapters of embeddings do, looks up rows of W itself."""
        raise ValueError(
            "expected a module that uses PITEmbedding by calling it, but this one reads rows of its weight W: they are not "
            "the embeddings, E = W (WᵀW)⁻¹. Adapters of single tokens or of low rank cannot be put on this embedding. With "
            "PEFT, train all of W: modules_to_save=[its name] with ensure_weight_tying=True"
        )

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        if value is not None:
            raise ValueError(f"expected max_norm=None, since W_out E = I would not survive clipped rows, got {value}")

    def forward(self, input: Tensor) -> Tensor:
        W, ids = self.weight, distributed.to_local(input)
        if distributed.is_dtensor(W) and input is ids:
            raise ValueError(
                "expected the weight of this rank or token ids as a DTensor, but the weight is a DTensor and the ids are not: "
                "with FSDP2 call the model, which gathers the weight; in tensor parallelism use RowwiseParallel"
            )
        check_ids(ids, len(W))
        split = kernels.splits(ids, precision.autocast_dtype(W))
        with precision.full_precision(W.device):
            e = distinct_rows(ids, W, lambda rows: divide(rows, W, self._inverse, split)).to(W.dtype)
        if self.padding_idx is not None and torch.is_grad_enabled():
            e = torch.where((ids == self.padding_idx)[..., None], e.detach(), e)
        # The factor has the model's dtype, as in Gemma 3.
        e = e if self.scale == 1.0 else e * torch.full((), self.scale, dtype=e.dtype, device=e.device)
        if input is ids:
            return e
        from torch.distributed.tensor import DTensor  # torch's tensor parallelism has made the ids one

        sharded: Any = input
        return DTensor.from_local(e, sharded.device_mesh, sharded.placements, run_check=False)

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        """E (V, d) without the scale, computed in float64 and cast once, by default to the dtype of W."""
        return FreePIT.share(self.weight).materialize(dtype)[0]

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}" + (
            "" if self.scale == 1.0 else f", scale={self.scale:g}"
        )
