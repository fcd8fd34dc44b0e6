"""Pseudo-Inverse Tying: embedding and head are coupled projections of one orthonormal token memory."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, Unpack, cast

import torch
from torch import Tensor

from manifold_tying import distributed, kernels, linalg, precision
from manifold_tying.manifolds import Retraction
from manifold_tying.parametrizations import Diagonal, dtype_after
from manifold_tying.tying._loss import LossOptions, linear_cross_entropy
from manifold_tying.tying._vocabulary import check_ids, distinct_rows, vocab_logits
from manifold_tying.tying.interface import TokenInterface

Memory = Literal["free", "frozen", "trainable"]
Transform = Literal["identity", "head", "embedding"]


class PIT(TokenInterface):
    """E = Z T⁻¹ and W_out = T Zᵀ with ZᵀZ = I and T symmetric positive definite, so that W_out E = I (PIT, section 4).

    ``memory`` selects what is stored, and so the class that ``PIT(...)`` returns:

    - "free": one table W (V, d) with polar factors W = Z T, so W_out = Wᵀ and E = W (WᵀW)⁻¹, the head's pseudo-inverse. Any
      optimizer trains W, and with it Z and T. See :class:`FreePIT`.
    - "frozen" (the paper's form) or "trainable": Z on the Stiefel manifold and T = L Lᵀ; a trainable Z needs an optimizer of
      :mod:`manifold_tying.optim`. See :class:`ManifoldPIT`.

    Parameters are float32 (float64 after ``.double()``) regardless of the model's dtype. The maps by T and T⁻¹ run in that
    dtype, with autocast off. Only where 16-bit products follow, on a GPU, they are sums of bfloat16 products, to about 2^-16.

    Args:
        vocab_size: V >= d.
        hidden_size: d.
        memory: "free", "frozen" or "trainable", see above.
        retraction: for a trainable memory, see :class:`ManifoldPIT`.
        diagonal: for a frozen or trainable memory, see :class:`ManifoldPIT`.
        std: for a free table, see :class:`FreePIT`.

    Attributes:
        memory: Z, (V, d).
        cholesky_factor: L, (d, d), lower triangular with positive diagonal, T = L Lᵀ.
        transform: T, (d, d).
        embedding_dtype: the model's dtype, which embeddings have.

    Raises:
        ValueError: vocab_size < hidden_size, unknown memory, an option that this memory does not have, or a wrong value.
    """

    # Not an ABC, because type checkers would reject ``PIT(...)``: FreePIT and ManifoldPIT override what raises
    # NotImplementedError here.
    memory: Tensor
    cholesky_factor: Tensor
    embedding_dtype: torch.dtype

    # copy and pickle call __new__ without arguments, hence the defaults.
    def __new__(cls, vocab_size: int = 0, hidden_size: int = 0, *, memory: Memory = "free", **options: Any) -> Self:
        """An instance of the class for ``memory``."""
        if cls is not PIT:
            return super().__new__(cls)
        return super().__new__(cast(type[Self], _pit_class(memory, options)))

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        memory: Memory = "free",
        retraction: Retraction = "polar",
        diagonal: Diagonal = "softplus",
        std: float | None = None,
    ) -> None:
        """See the class for the arguments."""
        super().__init__(vocab_size, hidden_size)
        if vocab_size < hidden_size:
            raise ValueError(
                f"expected vocab_size >= hidden_size, since d orthonormal columns need V >= d rows; got V={vocab_size}, "
                f"d={hidden_size}; use a larger vocabulary or a narrower model"
            )
        self.embedding_dtype = torch.get_default_dtype()
        self.register_load_state_dict_post_hook(_follow_loaded_dtype)

    @classmethod
    def from_embedding(
        cls, weight: Tensor, *, transform: Transform = "identity", memory: Memory = "free", **options: str
    ) -> "PIT":
        """PIT from an existing table E0 = U H (polar factors): Z = U. (PIT, section 4.1.)

        No T reproduces transpose tying by E0 unless H² = I: E0ᵀE0 = H², whereas PIT has W_out E = I.

        Args:
            weight: E0 (V, d), V >= d, of full column rank.
            transform: the initial T: "identity" (the paper), "head" (T = H, so W_out = E0ᵀ) or "embedding" (T = H⁻¹, so
                E = E0).
            memory: as for :class:`PIT`.
            options: options of :class:`ManifoldPIT`.

        Raises:
            ValueError: as for :class:`PIT`; unknown transform; the table is not a floating (V, d) with V >= d, contains NaN
                or Inf, or is rank-deficient.
        """
        precision.check_choice("transform", transform, Transform)
        form = _pit_class(memory, options)
        U, H = _decompose(weight)
        T = precision.eye_like(H)
        if transform != "identity":
            T = H if transform == "head" else precision.sym(torch.linalg.inv(H))
        pit = form._from_factors(U, T, precision.compute_dtype(weight.dtype), memory=memory, **options)
        return pit.to(weight.dtype)

    @classmethod
    def _from_factors(cls, Z: Tensor, T: Tensor, dtype: torch.dtype, **options: Any) -> "PIT":
        """The interface with these float64 factors and parameters in ``dtype``."""
        raise NotImplementedError

    def to_free(self) -> "PIT":
        """A copy with the same E and W_out as one free table W = Z T, which any optimizer trains."""
        with torch.no_grad():
            Z = distributed.full_tensor(self.memory)
            free = _pit_class("free", {})._from_factors(Z.double(), self.transform.double(), Z.dtype)
            return free.to(self.embedding_dtype)

    @property
    def transform(self) -> Tensor:
        """T = L Lᵀ, (d, d)."""
        L = self.cholesky_factor
        with precision.full_precision(L.device):
            return L @ L.mT

    @property
    def head_weight(self) -> Tensor:
        """W_outᵀ (V, d), differentiable."""
        raise NotImplementedError

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of E at ids (...), (..., d).

        T⁻¹ is applied once to each distinct token where they can be counted without a sync, see ``distinct_rows``.
        """
        check_ids(ids, self.vocab_size)
        table = self._table()
        split = kernels.splits(ids, self.embedding_dtype, precision.autocast_dtype(table))
        with precision.full_precision(ids.device):
            e = distinct_rows(ids, table, lambda rows: self._divide(rows, split))
        return e.to(self.embedding_dtype)

    def _table(self) -> Tensor:
        """The stored matrix (V, d) that tokens index."""
        raise NotImplementedError

    def _divide(self, rows: Tensor, split: bool) -> Tensor:
        """Map rows of the table (n, d) to rows of E, if ``split`` by split products."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden W_out, (..., V)."""
        return vocab_logits(*self._factors(hidden))

    def loss(self, hidden: Tensor, targets: Tensor, **options: Unpack[LossOptions]) -> Tensor:
        return linear_cross_entropy(*self._factors(hidden), targets, **options)

    def _factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Matrices (..., d), in the dtype of hidden, and (V, d), whose product is the logits."""
        raise NotImplementedError

    def materialize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """(E, W_out), computed in float64 and cast once, by default to the parameters' dtype."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw new parameters from torch's default generator, as in the constructor.

        Also initializes a module from the meta device, after ``to_empty``. Parameters may be DTensors sharded by rows: with
        the same seed, ranks get the values that one process would draw.
        """
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Device moves and .double() as usual; .half() and .bfloat16() only change the dtype of the embeddings."""
        self.embedding_dtype = dtype_after(fn, self.embedding_dtype)

        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrowed = tensor.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device, torch.float32) if narrowed else moved

        super()._apply(wide, recurse)
        return self


def _follow_loaded_dtype(pit: PIT, _: Any) -> None:
    """assign=True may have replaced the stored tensors by ones of another dtype."""
    if (dtype := pit._table().dtype) != precision.compute_dtype(pit.embedding_dtype):
        pit.to(dtype)


def check_hidden(hidden: Tensor, hidden_size: int) -> None:
    """ValueError unless hidden is floating point of shape (..., d)."""
    if not hidden.is_floating_point():
        raise ValueError(f"expected hidden states in floating point, got {hidden.dtype}; for token ids call embed")
    if hidden.shape[-1:] != (hidden_size,):
        raise ValueError(f"expected hidden states (..., {hidden_size}), not logits, got {tuple(hidden.shape)}")


def _pit_class(memory: Memory, options: Mapping[str, Any]) -> type[PIT]:
    """The class for this memory; ValueError if it is unknown or does not have one of the options."""
    precision.check_choice("memory", memory, Memory)
    others = ("retraction", "diagonal") if memory == "free" else ("std",)
    if given := [name for name in others if name in options]:
        raise ValueError(f"memory={memory!r} has no {', '.join(given)}; leave it out, or choose another memory")
    from manifold_tying.tying._free_pit import FreePIT
    from manifold_tying.tying._manifold_pit import ManifoldPIT

    return FreePIT if memory == "free" else ManifoldPIT


def _decompose(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factors of a table in float64; ValueError, with the reason, if PIT cannot start from it."""
    if weight.ndim != 2:
        raise ValueError(f"expected an embedding table (V, d), got {tuple(weight.shape)}")
    precision.compute_dtype(weight.dtype)
    V, d = weight.shape
    if V < d:
        raise ValueError(f"expected V >= d, since d orthonormal columns need V >= d rows; got a table of ({V}, {d})")
    U, H = linalg.polar(weight.detach().double())
    singular_values = torch.linalg.eigvalsh(H)
    if not singular_values[0] > 1e-5 * singular_values[-1]:
        raise ValueError(
            f"expected a table of full column rank, got smallest / largest singular value "
            f"{singular_values[0] / singular_values[-1]:.1e} (at least 1e-5 is needed): its polar factor is not determined. "
            "Look for duplicate, constant or zero columns"
        )
    return U, H
