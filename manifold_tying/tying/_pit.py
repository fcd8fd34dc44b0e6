"""Pseudo-Inverse Tying: embedding and head as coupled projections of one orthonormal token memory."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manifold_tying import linalg
from manifold_tying.manifolds import Retraction
from manifold_tying.parametrizations import Bounds, Diagonal
from manifold_tying.tying._loss import linear_cross_entropy
from manifold_tying.tying._start import decompose
from manifold_tying.tying._tables import INITIAL_STD
from manifold_tying.tying._vocabulary import lookup, scores
from manifold_tying.tying.interface import TokenInterface, check_ids

Memory = Literal["free", "frozen", "trainable"]
Transform = Literal["identity", "head", "embedding"]


class PIT(TokenInterface):
    """E = Z T⁻¹ and W_out = T Zᵀ with ZᵀZ = I and T symmetric positive definite, so that W_out E = I (PIT, section 4).

    ``memory`` says what is stored. ``PIT(...)`` returns the class for it:

    - "free": one table W = Z T (V, d), its polar factors. Then W_out = Wᵀ and E = W (WᵀW)⁻¹, the head's pseudo-inverse, so
      that training Z and T together is training W, by any optimizer. See :class:`FreePIT`.
    - "frozen" (the paper's form) or "trainable": Z on the Stiefel manifold and T = L Lᵀ; a trainable Z needs an optimizer of
      :mod:`manifold_tying.optim`. See :class:`ManifoldPIT`.

    Parameters are float32 (or float64 after ``.double()``) whatever the model's dtype; the maps by T and T⁻¹ run in it, with
    autocast off.

    Args:
        vocab_size: V >= d.
        hidden_size: d.
        memory: what is stored, see above.
        retraction: of a trainable memory, see :class:`ManifoldPIT`.
        diagonal: of the transform of a frozen or trainable memory, see :class:`ManifoldPIT`.
        bounds: of that diagonal, see :class:`ManifoldPIT`.
        std: of a free table's entries at the start, see :class:`FreePIT`.

    Attributes:
        memory: Z, (V, d).
        cholesky_factor: L, (d, d), lower triangular with positive diagonal, T = L Lᵀ.
        transform: T, (d, d).

    Raises:
        ValueError: vocab_size < hidden_size, an unknown memory, an option of another memory, or a wrong value of one.
    """

    # Abstract in all but name: FreePIT and ManifoldPIT fill in what raises NotImplementedError here. With abstract methods
    # type checkers would refuse every ``PIT(...)``.
    memory: Tensor
    cholesky_factor: Tensor
    bridge: nn.Parameter | None
    _dtype_marker: Tensor

    # The sizes have defaults because copy and pickle call it without arguments.
    def __new__(cls, vocab_size: int = 0, hidden_size: int = 0, *, memory: Memory = "free", **options: Any) -> Self:
        """An instance of the class that stores ``memory``."""
        if cls is not PIT:
            return super().__new__(cls)
        return super().__new__(cast(type[Self], _form(memory, options)))

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        memory: Memory = "free",
        retraction: Retraction = "polar",
        diagonal: Diagonal = "softplus",
        bounds: Bounds | None = None,
        std: float = INITIAL_STD,
    ) -> None:
        """What all forms have; see the class for the arguments."""
        super().__init__(vocab_size, hidden_size)
        if vocab_size < hidden_size:
            raise ValueError(
                f"expected vocab_size >= hidden_size, since d orthonormal columns need V >= d rows; got V={vocab_size}, "
                f"d={hidden_size}; use a larger vocabulary or a narrower model"
            )
        # Follows the model's dtype through .to(...), where the parameters stay wide: the dtype that embeddings come out in.
        self.register_buffer("_dtype_marker", torch.empty(0), persistent=False)
        self.register_parameter("bridge", None)

    @classmethod
    def from_embedding(
        cls,
        weight: Tensor,
        *,
        transform: Transform = "identity",
        bridge: bool = False,
        memory: Memory = "free",
        **options: Any,
    ) -> "PIT":
        """PIT from an existing table E0 = U H (polar factors): Z = U. (PIT, section 4.1.)

        No T makes it equal to transpose tying by E0, unless H² = I: E0ᵀE0 = H², where PIT has W_out E = I.

        Args:
            weight: E0 (V, d), V >= d, of full column rank.
            transform: where T starts: "identity" (the paper), "head" (T = H, so W_out = E0ᵀ) or "embedding" (T = H⁻¹, so
                E = E0).
            bridge: keep the tied model's function exactly by a trainable d x d matrix, H at the start, applied to
                embeddings and to hidden states, with T = I whatever ``transform`` says. W_out E = I then holds for Z and T
                alone and no longer for the maps of the model.
            memory: as for :class:`PIT`.
            options: of :class:`ManifoldPIT`, with bounds around the diagonal of the L that this T has.

        Raises:
            ValueError: as for :class:`PIT`; an unknown transform; a table that is no floating (V, d) with V >= d, holds NaN
                or Inf, or is not of full column rank; bounds that would change the diagonal of L.
        """
        if transform not in get_args(Transform):
            raise ValueError(f"unknown transform {transform!r}; choose one of {', '.join(get_args(Transform))}")
        form = _form(memory, options)
        U, H = decompose(weight)
        T = linalg.eye_like(H)
        if transform != "identity" and not bridge:
            T = H if transform == "head" else linalg.sym(torch.linalg.inv(H))
        pit = form._from_factors(U, T, linalg.compute_dtype(weight.dtype), memory=memory, **options)
        if bridge:
            pit.bridge = nn.Parameter(H.to(pit._table().dtype))
        return pit.to(weight.dtype)

    @classmethod
    def _from_factors(cls, Z: Tensor, T: Tensor, dtype: torch.dtype, **options: Any) -> "PIT":
        """The interface of float64 factors, with parameters in ``dtype``."""
        raise NotImplementedError

    def to_free(self) -> "PIT":
        """The same pair E, W_out (and bridge) as one free table W = Z T, which any optimizer trains; a copy."""
        with torch.no_grad():
            Z = linalg.full_tensor(self.memory)
            free = _form("free", {})._from_factors(Z.double(), self.transform.double(), Z.dtype)
            if self.bridge is not None:
                free.bridge = nn.Parameter(self.bridge.detach().clone())
            return free.to(self._dtype_marker.dtype)

    @property
    def transform(self) -> Tensor:
        """T = L Lᵀ, (d, d)."""
        with linalg.full_precision(self._dtype_marker.device):
            L = self.cholesky_factor
            return L @ L.mT

    @property
    def head_weight(self) -> Tensor:
        """W_outᵀ (V, d), differentiable; with a bridge B, W_outᵀ Bᵀ."""
        raise NotImplementedError

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of E at ids (...), (..., d).

        The map by T⁻¹ is applied to each distinct token once. On GPUs and in compiled code, which are not to wait for their
        number, that is every looked-up row, or the whole vocabulary where it is smaller.
        """
        check_ids(ids)
        with linalg.full_precision(ids.device):
            table = self._table()
            if (
                ids.device.type == "cpu"
                and linalg.has_data(ids)
                and not linalg.in_transform()
                and not torch.compiler.is_compiling()
            ):
                rows, index = ids.unique(return_inverse=True)
                e = F.embedding(index, self._divide(lookup(rows, table)))
            elif ids.numel() > self.vocab_size and not linalg.is_dtensor(table):
                e = F.embedding(ids, self._divide(table))
            else:
                e = self._divide(lookup(ids.flatten(), table)).reshape(*ids.shape, self.hidden_size)
            if self.bridge is not None:
                e = e @ self.bridge
        return e.to(self._dtype_marker.dtype)

    def _table(self) -> Tensor:
        """The stored matrix (V, d) whose rows tokens look up."""
        raise NotImplementedError

    def _divide(self, rows: Tensor) -> Tensor:
        """Rows of the table (n, d) to rows of E."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden W_out, (..., V)."""
        return scores(*self._factors(hidden))

    def loss(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        return linear_cross_entropy(*self._factors(hidden), targets, ignore_index=ignore_index)

    def _factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Two matrices (..., d) and (V, d), the first in the dtype of hidden, whose product are the logits."""
        raise NotImplementedError

    def materialize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """(E, W_out), computed in float64 and cast once, to the parameters' dtype by default; with a bridge (E B, B W_out)."""
        raise NotImplementedError

    def _with_bridge(self, E: Tensor, W_out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.bridge is not None:
            bridge = linalg.full_tensor(self.bridge).double()
            E, W_out = E @ bridge, bridge @ W_out
        return E.to(dtype).contiguous(), W_out.to(dtype).contiguous()

    def reset_parameters(self) -> None:
        """New parameters from torch's default generator, as at construction; RuntimeError with a bridge.

        Also the way up from the meta device, after ``to_empty``. Parameters may be DTensors sharded by rows: with the same
        seed on all of them, processes get what one process would.
        """
        if self.bridge is not None:
            raise RuntimeError("a bridge comes from a table; make the interface anew by from_embedding")

    def penalty(self, *, log_det: float = 0.0, diagonal_scale: float = 0.0) -> Tensor:
        """Optional regularizers: log_det (log det T / d)² + diagonal_scale mean (log L_ii)², a scalar. (PIT, appendix A.2.)"""
        logs = self.cholesky_factor.diagonal().log()
        return log_det * (2 * logs.mean()).square() + diagonal_scale * logs.square().mean()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Device moves and .double() as usual; .half() and .bfloat16() reach ``_dtype_marker`` alone."""

        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrowed = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if narrowed and tensor is not self._dtype_marker else moved

        return super()._apply(wide, recurse)


def check_hidden(hidden: Tensor) -> None:
    """ValueError for what is no hidden state."""
    if not hidden.is_floating_point():
        raise ValueError(f"expected hidden states in floating point, got {hidden.dtype}; for token ids call embed")


def _form(memory: Memory, options: Mapping[str, Any]) -> type[PIT]:
    """The class that stores this memory; ValueError for an unknown one, or for options of the other."""
    if memory not in get_args(Memory):
        raise ValueError(f"unknown memory {memory!r}; choose one of {', '.join(get_args(Memory))}")
    others = ("retraction", "diagonal", "bounds") if memory == "free" else ("std",)
    if given := [name for name in others if name in options]:
        raise ValueError(f"memory={memory!r} has no {', '.join(given)}; leave it out, or choose another memory")
    from manifold_tying.tying._free_pit import FreePIT
    from manifold_tying.tying._manifold_pit import ManifoldPIT

    return FreePIT if memory == "free" else ManifoldPIT
