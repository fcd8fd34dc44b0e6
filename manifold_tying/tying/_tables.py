"""The two usual token interfaces: separate tables, and one table used on both sides."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from manifold_tying import linalg
from manifold_tying.tying._loss import linear_cross_entropy
from manifold_tying.tying._vocabulary import lookup, scores
from manifold_tying.tying.interface import TokenInterface, check_ids

INITIAL_STD = 0.02  # of a fresh table, as GPT-2 and Llama have it


class _PlainTables(TokenInterface):
    """E and W_outᵀ are tables that need no computation: whatever ``embedding`` and ``head`` are, both (V, d)."""

    def __init__(self, vocab_size: int, hidden_size: int, std: float) -> None:
        super().__init__(vocab_size, hidden_size)
        self.std = std

    @property
    @abstractmethod
    def _embedding(self) -> Tensor: ...

    @property
    @abstractmethod
    def _head(self) -> Tensor: ...

    def embed(self, ids: Tensor) -> Tensor:
        check_ids(ids)
        return lookup(ids, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        return scores(hidden, self._head)

    def loss(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        return linear_cross_entropy(hidden, self._head, targets, ignore_index=ignore_index)

    def materialize(self) -> tuple[Tensor, Tensor]:
        E, head = (linalg.whole(table.detach()) for table in (self._embedding, self._head))
        return E.clone(), head.T.contiguous()

    def reset_parameters(self) -> None:
        """Draw the tables anew from torch's default generator, as at construction.

        Also the way up from the meta device, after ``to_empty``. Parameters may be DTensors sharded by rows: with the same
        seed on all of them, processes get what one process would.
        """
        with torch.no_grad():
            for table in self.parameters():
                linalg.normal_rows_(table).mul_(self.std)


class Untied(_PlainTables):
    """Separate tables: E = ``embedding`` (V, d), W_out = ``head``ᵀ (V, d), both N(0, std²) at the start."""

    def __init__(self, vocab_size: int, hidden_size: int, *, std: float = INITIAL_STD) -> None:
        super().__init__(vocab_size, hidden_size, std)
        self.embedding = nn.Parameter(torch.randn(vocab_size, hidden_size) * std)
        self.head = nn.Parameter(torch.randn(vocab_size, hidden_size) * std)

    @property
    def _embedding(self) -> Tensor:
        return self.embedding

    @property
    def _head(self) -> Tensor:
        return self.head


class TransposeTying(_PlainTables):
    """One table on both sides: E = ``weight`` (V, d), W_out = Eᵀ (Press and Wolf 2017), N(0, std²) at the start."""

    def __init__(self, vocab_size: int, hidden_size: int, *, std: float = INITIAL_STD) -> None:
        super().__init__(vocab_size, hidden_size, std)
        self.weight = nn.Parameter(torch.randn(vocab_size, hidden_size) * std)

    @property
    def _embedding(self) -> Tensor:
        return self.weight

    @property
    def _head(self) -> Tensor:
        return self.weight
