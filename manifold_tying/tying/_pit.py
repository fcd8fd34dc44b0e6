"""Pseudo-Inverse Tying: embedding and head as coupled projections of one orthonormal token memory."""

import math
from collections.abc import Callable
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import linalg
from manifold_tying.manifolds import Retraction
from manifold_tying.parametrizations import Bounds, CholeskyFactor, Diagonal, OnStiefel, parametrized, stiefel
from manifold_tying.tying._loss import linear_cross_entropy
from manifold_tying.tying._start import check_bounds, decompose
from manifold_tying.tying._transform import divide_by_transform, multiply_by_transform
from manifold_tying.tying._vocabulary import lookup, scores
from manifold_tying.tying.interface import TokenInterface, check_ids

Memory = Literal["frozen", "trainable"]
Transform = Literal["identity", "head", "embedding"]


class PIT(TokenInterface):
    """E = Z T⁻¹ and W_out = T Zᵀ with ZᵀZ = I and T = L Lᵀ, so that W_out E = I whatever Z and L are (PIT, section 4).

    Starts from a random orthonormal memory and T = I. The state is (Z, L) only, float32 (or float64 after ``.double()``)
    whatever the model's dtype; the maps by T and T⁻¹ run in it, with autocast off.

    Args:
        vocab_size: V >= d.
        hidden_size: d.
        memory: "frozen" (the paper's default) or "trainable", to be moved by a Riemannian optimizer.
        retraction: by which that optimizer keeps ZᵀZ = I, see :class:`manifold_tying.Stiefel`.
        diagonal: "softplus" or "exp", the map that keeps L's diagonal positive.
        bounds: optional (low, high) clamp of L's diagonal, with low <= 1 <= high, where it starts.

    Attributes:
        memory: Z, (V, d).
        cholesky_factor: L, (d, d), lower triangular with positive diagonal.
        transform: T, (d, d).

    Raises:
        ValueError: vocab_size < hidden_size, an unknown memory, retraction or diagonal, or bounds without 0 < low < high
            and low <= 1 <= high.
    """

    memory: Tensor
    cholesky_factor: Tensor
    bridge: nn.Parameter | None
    _like: Tensor

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        memory: Memory = "frozen",
        retraction: Retraction = "polar",
        diagonal: Diagonal = "softplus",
        bounds: Bounds | None = None,
    ) -> None:
        """A random orthonormal memory and T = I; see the class for the arguments."""
        super().__init__(vocab_size, hidden_size)
        if vocab_size < hidden_size:
            raise ValueError(
                f"expected vocab_size >= hidden_size, since d orthonormal columns need V >= d rows; got V={vocab_size}, "
                f"d={hidden_size}; use a larger vocabulary or a narrower model"
            )
        if memory not in get_args(Memory):
            raise ValueError(f"unknown memory {memory!r}; choose one of {', '.join(get_args(Memory))}")
        dtype = linalg.working_dtype(torch.get_default_dtype())
        factor = CholeskyFactor(diagonal, bounds, dtype)
        if factor.bounds is not None:
            check_bounds(torch.ones(1, device="cpu"), factor.bounds)
        Z = nn.Parameter(torch.randn(vocab_size, hidden_size, dtype=dtype), requires_grad=memory == "trainable")
        self.register_parameter("memory", Z)
        stiefel(self, "memory", retraction=retraction)
        self.register_parameter("cholesky_factor", nn.Parameter(torch.eye(hidden_size, dtype=dtype)))
        parametrize.register_parametrization(self, "cholesky_factor", factor)
        # Follows the model's dtype through .to(...), where Z and L stay wide: the dtype that embeddings come out in.
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self.register_parameter("bridge", None)

    @classmethod
    def from_embedding(
        cls,
        weight: Tensor,
        *,
        transform: Transform = "identity",
        bridge: bool = False,
        memory: Memory = "frozen",
        retraction: Retraction = "polar",
        diagonal: Diagonal = "softplus",
        bounds: Bounds | None = None,
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
            memory, retraction, diagonal: as for :class:`PIT`.
            bounds: as there, but around the diagonal of the L that this T has.

        Raises:
            ValueError: as for :class:`PIT`; an unknown transform; a table that is no floating (V, d) with V >= d, holds NaN
                or Inf, or is not of full column rank; bounds that would change the diagonal of L.
        """
        if transform not in get_args(Transform):
            raise ValueError(f"unknown transform {transform!r}; choose one of {', '.join(get_args(Transform))}")
        U, H = decompose(weight)
        T = linalg.identity_like(H)  # assigned as well: the one from __init__ is an identity to float32 rounding only
        if transform != "identity" and not bridge:
            T = H if transform == "head" else linalg.symmetric(torch.linalg.inv(H))
        L = torch.linalg.cholesky(T).contiguous()
        clamp = CholeskyFactor(diagonal, bounds).bounds
        if clamp is not None:
            check_bounds(L.diagonal(), clamp)
        with torch.device("meta"):  # a random memory would be drawn and projected in vain
            pit = cls(*weight.shape, memory=memory, retraction=retraction, diagonal=diagonal)
        stored = parametrized(pit)
        cast(CholeskyFactor, stored["cholesky_factor"][0]).bounds = clamp  # here 1 need not lie between them
        pit = pit.to(linalg.working_dtype(weight.dtype)).to_empty(device=weight.device)
        with torch.no_grad():
            stored["memory"].original.copy_(U)  # orthonormal already; assigning pit.memory would project again
        if bridge:
            pit.bridge = nn.Parameter(H.to(pit.memory.dtype))
        pit.cholesky_factor = L.to(pit.memory.dtype)
        return pit.to(weight.dtype)

    @property
    def transform(self) -> Tensor:
        """T = L Lᵀ, (d, d)."""
        with linalg.full_precision(self._like.device):
            L = self.cholesky_factor
            return L @ L.mT

    def embed(self, ids: Tensor) -> Tensor:
        """z T⁻¹ for the rows z of Z at ids (...), by two triangular solves: (..., d).

        Each distinct token is solved for once. On GPUs and in compiled code, which are not to wait for their number, that is
        every looked-up row, or the whole vocabulary where it is smaller.
        """
        check_ids(ids)
        with linalg.full_precision(ids.device):
            Z, L = self.memory, self.cholesky_factor
            if (
                ids.device.type == "cpu"
                and linalg.has_values(ids)
                and not linalg.is_transformed()
                and not torch.compiler.is_compiling()
            ):
                rows, index = ids.unique(return_inverse=True)
                e = F.embedding(index, divide_by_transform(lookup(rows, Z), L))
            elif ids.numel() > self.vocab_size and not linalg.is_distributed(Z):
                e = F.embedding(ids, divide_by_transform(Z, L))
            else:
                e = divide_by_transform(lookup(ids.flatten(), Z), L).reshape(*ids.shape, self.hidden_size)
            if self.bridge is not None:
                e = e @ self.bridge
        return e.to(self._like.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """(h T) Zᵀ, (..., V)."""
        return scores(*self._factors(hidden))

    def loss(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        return linear_cross_entropy(*self._factors(hidden), targets, ignore_index=ignore_index)

    def materialize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """(E, W_out), computed in float64 and cast once, to Z's dtype by default; with a bridge B, (E B, B W_out)."""
        with torch.no_grad():
            memory = linalg.whole(self.memory)
            Z, L = memory.double(), self.cholesky_factor.double()
            E, W_out = divide_by_transform(Z, L), L @ (L.mT @ Z.mT)
            if self.bridge is not None:
                bridge = linalg.whole(self.bridge).double()
                E, W_out = E @ bridge, bridge @ W_out
            dtype = dtype or memory.dtype
            return E.to(dtype).contiguous(), W_out.to(dtype).contiguous()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A random memory from torch's default generator and T = I, as at construction; RuntimeError with a bridge.

        Also the way up from the meta device, after ``to_empty``. Parameters may be DTensors sharded by rows: with the same
        seed on all of them, processes get what one process would.
        """
        if self.bridge is not None:
            raise RuntimeError("a bridge comes from a table; make the interface anew by from_embedding")
        stored = parametrized(self)
        Z, L = stored["memory"].original, stored["cholesky_factor"].original
        cast(OnStiefel, stored["memory"][0]).manifold.random_(Z)
        eye = torch.eye(self.hidden_size, dtype=L.dtype, device=L.device)
        linalg.assign_(L, cast(CholeskyFactor, stored["cholesky_factor"][0]).right_inverse(eye))

    def penalty(self, *, log_det: float = 0.0, diagonal_scale: float = 0.0) -> Tensor:
        """Optional regularizers: log_det (log det T / d)² + diagonal_scale mean (log L_ii)², a scalar. (PIT, appendix A.2.)"""
        logs = self.cholesky_factor.diagonal().log()
        return log_det * (2 * logs.mean()).square() + diagonal_scale * logs.square().mean()

    def _factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """h T and Z, whose product are the logits.

        h T is larger than they are by about √(V/d), beyond the range of float16 where they are well inside it: for products
        in float16 a power of two near that goes from h T to Z.
        """
        if linalg.product_dtype(hidden) != torch.float16:
            return self._readout(hidden), self.memory
        factor = 2.0 ** round(math.log2(self.vocab_size / self.hidden_size) / 2)
        return self._readout(hidden, factor), self.memory * factor

    def _readout(self, hidden: Tensor, divisor: float = 1.0) -> Tensor:
        """h T / divisor in float32, in the dtype of h."""
        if not hidden.is_floating_point():
            raise ValueError(f"expected hidden states in floating point, got {hidden.dtype}; for token ids call embed")
        with linalg.full_precision(hidden.device):
            L = self.cholesky_factor
            h = hidden.reshape(-1, hidden.shape[-1]).to(L.dtype)
            if self.bridge is not None:
                h = h @ self.bridge
            h = multiply_by_transform(h, L)
            return (h if divisor == 1.0 else h / divisor).reshape(hidden.shape).to(hidden.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PIT":
        """Device moves as usual, .double() projects Z again; .half() and .bfloat16() reach ``_like`` alone."""

        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrowed = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if narrowed and tensor is not self._like else moved

        before = self.memory.dtype
        super()._apply(wide, recurse)
        widened = before == torch.float32 and self.memory.dtype == torch.float64 and not self.memory.is_meta
        if widened and parametrize.is_parametrized(self, "memory"):
            self.memory = self.memory.detach()  # orthonormal to float32 rounding so far, and a frozen one would stay so
        return self

    def extra_repr(self) -> str:
        # by its parameter's name, which materialize(pit) shortens
        stored = next(p for name, p in self.named_parameters() if "memory" in name)
        kind = "trainable" if stored.requires_grad else "frozen"
        return f"{super().extra_repr()}, memory={kind!r}" + (", bridge=True" if self.bridge is not None else "")
