"""The two usual token interfaces: separate tables, and one table used on both sides."""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from manifold_tying import linalg
from manifold_tying.tying._loss import linear_cross_entropy
from manifold_tying.tying._vocabulary import lookup, scores
from manifold_tying.tying.interface import TokenInterface, check_ids

INITIAL_STD = 0.02  # of a fresh table, as GPT-2 and Llama have it


class _PlainTables(TokenInterface):
    """E and W_outᵀ are tables (V, d), the second one times a learned exp(``log_scale``) if there is one."""

    def __init__(self, vocab_size: int, hidden_size: int, std: float, logit_scale: bool) -> None:
        super().__init__(vocab_size, hidden_size)
        self.std = std
        # (1,) and not (), which FSDP2 could not shard
        self.log_scale = nn.Parameter(torch.zeros(1)) if logit_scale else None

    @property
    @abstractmethod
    def _embedding(self) -> Tensor: ...

    @property
    @abstractmethod
    def _head(self) -> Tensor: ...

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.log_scale is None else hidden * linalg.full_tensor(self.log_scale).exp().to(hidden.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        check_ids(ids)
        return lookup(ids, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        return scores(self._scaled(hidden), self._head)

    def loss(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        return linear_cross_entropy(self._scaled(hidden), self._head, targets, ignore_index=ignore_index)

    def materialize(self) -> tuple[Tensor, Tensor]:
        E, head = (linalg.full_tensor(table.detach()) for table in (self._embedding, self._head))
        return E.clone(), self._scaled(head).detach().T.clone(memory_format=torch.contiguous_format)

    def reset_parameters(self) -> None:
        """Draw the tables anew from torch's default generator, as at construction.

        Also the way up from the meta device, after ``to_empty``. Parameters may be DTensors sharded by rows: with the same
        seed on all of them, processes get what one process would.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "log_scale":
                    parameter.zero_()
                else:
                    linalg.sharded_normal_(parameter).mul_(self.std)


class Untied(_PlainTables):
    """Separate tables: E = ``embedding`` (V, d), W_out = ``head``ᵀ (V, d), both N(0, std²) at the start.

    Args:
        vocab_size: V.
        hidden_size: d.
        std: of the fresh tables' entries.
        logit_scale: multiply the logits by a learned exp(``log_scale``), 1 at the start.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, std: float = INITIAL_STD, logit_scale: bool = False
    ) -> None:
        super().__init__(vocab_size, hidden_size, std, logit_scale)
        self.embedding = nn.Parameter(torch.randn(vocab_size, hidden_size) * std)
        self.head = nn.Parameter(torch.randn(vocab_size, hidden_size) * std)

    @property
    def _embedding(self) -> Tensor:
        return self.embedding

    @property
    def _head(self) -> Tensor:
        return self.head


class TransposeTying(_PlainTables):
    """One table on both sides: E = ``weight`` (V, d), W_out = Eᵀ (Press and Wolf 2017), N(0, std²) at the start.

    Args:
        vocab_size: V.
        hidden_size: d.
        std: of the fresh table's entries.
        logit_scale: multiply the logits by a learned exp(``log_scale``), 1 at the start.
        input_gradient_scale: multiplies the lookup's part of the table's gradient, which the head's part otherwise
            outweighs (arXiv 2603.26663). The values do not change.

    Raises:
        ValueError: input_gradient_scale negative or not finite.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        std: float = INITIAL_STD,
        logit_scale: bool = False,
        input_gradient_scale: float = 1.0,
    ) -> None:
        super().__init__(vocab_size, hidden_size, std, logit_scale)
        if not 0 <= input_gradient_scale < math.inf:
            raise ValueError(f"expected a finite input_gradient_scale >= 0, got {input_gradient_scale}")
        self.input_gradient_scale = input_gradient_scale
        self.weight = nn.Parameter(torch.randn(vocab_size, hidden_size) * std)

    def embed(self, ids: Tensor) -> Tensor:
        rows = super().embed(ids)
        if self.input_gradient_scale == 1.0:
            return rows
        return rows.detach().lerp(
            rows, self.input_gradient_scale
        )  # between equals: the rows, and a part of the gradient

    @property
    def _embedding(self) -> Tensor:
        return self.weight

    @property
    def _head(self) -> Tensor:
        return self.weight
