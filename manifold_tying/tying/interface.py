"""Base class of all token interfaces."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class TokenInterface(nn.Module, ABC):
    """The pair embedding E (V, d) and unembedding W_out (d, V) of a language model, in one module.

    One module owns both sides, so that copying, sharding or materializing parameters cannot untie them.
    """

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        if vocab_size < 1 or hidden_size < 1:
            raise ValueError(f"expected positive sizes, got vocab_size={vocab_size}, hidden_size={hidden_size}")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Rows of E: maps token ids (...) to vectors (..., d)."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden W_out: maps hidden states (..., d) to logits (..., V)."""

    @abstractmethod
    def loss(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        """Mean cross-entropy in nats, a float32 scalar, of hidden (..., d) against targets (...).

        Positions whose target is ``ignore_index`` do not count; 0 if none counts. Never holds all logits.
        """

    @abstractmethod
    def materialize(self) -> tuple[Tensor, Tensor]:
        """(E (V, d), W_out (d, V)) as plain dense tensors, detached copies."""

    def forward(self, inputs: Tensor, *, head: bool = False) -> Tensor:
        """:meth:`embed`, or :meth:`logits` with ``head``: calling the module runs its hooks."""
        return self.logits(inputs) if head else self.embed(inputs)

    def extra_repr(self) -> str:
        return f"vocab_size={self.vocab_size}, hidden_size={self.hidden_size}"


def check_ids(ids: Tensor) -> None:
    """ValueError unless ids are int32 or int64."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"expected int64 or int32 token ids, got {ids.dtype}; convert them with ids.long()")
