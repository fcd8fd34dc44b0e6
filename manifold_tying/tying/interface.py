"""The base class of all token interfaces, and the two usual ones: separate tables, and one table for both sides."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn

from manifold_tying import distributed
from manifold_tying.tying._loss import LossOptions, linear_cross_entropy
from manifold_tying.tying._vocabulary import check_ids, vocab_embedding, vocab_logits


class TokenInterface(nn.Module, ABC):
    """The pair embedding E (V, d) and unembedding W_out (d, V) of a language model, in one module.

    One module owns both sides, so that copying, sharding or materializing parameters cannot untie them.
    """

    __call__: Callable[..., Tensor]

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
    def loss(self, hidden: Tensor, targets: Tensor, **options: Unpack[LossOptions]) -> Tensor:
        """Cross-entropy in nats, by default the mean, of hidden (..., d) against targets (...).

        Holds one chunk of the logits at a time. The options are those of :func:`linear_cross_entropy`.
        """

    @abstractmethod
    def materialize(self) -> tuple[Tensor, Tensor]:
        """(E (V, d), W_out (d, V)) as plain dense tensors, detached copies."""

    def forward(self, inputs: Tensor, *, head: bool = False) -> Tensor:
        """:meth:`embed`, or :meth:`logits` with ``head``: calling the module runs its hooks."""
        return self.logits(inputs) if head else self.embed(inputs)

    def extra_repr(self) -> str:
        return f"vocab_size={self.vocab_size}, hidden_size={self.hidden_size}"


INITIAL_STD = 0.02  # as in GPT-2 and Llama


def tied_std(hidden_size: int) -> float:
    """Initial standard deviation of a tied table in the recipe (docs/learning-rates.md): min(0.06, 7.68 / d).

    The std times d is about the logit that a token gets from its own normalized embedding. With several times as much, training
    starts by unlearning that the next token is the current one.
    """
    return min(0.06, 7.68 / hidden_size)


class _PlainTables(TokenInterface):
    """E and W_outᵀ are tables (V, d); the second is multiplied by a learned exp(``log_scale``) if there is one."""

    _names: tuple[str, str]
    """The parameters E and W_outᵀ."""

    def __init__(self, vocab_size: int, hidden_size: int, std: float, logit_scale: bool) -> None:
        super().__init__(vocab_size, hidden_size)
        self.std = std
        # shape (1,): FSDP2 cannot shard a scalar
        self.log_scale = nn.Parameter(torch.zeros(1)) if logit_scale else None

    @property
    def _tables(self) -> tuple[Tensor, Tensor]:
        return getattr(self, self._names[0]), getattr(self, self._names[1])

    def _scaled(self, hidden: Tensor) -> Tensor:
        if self.log_scale is None:
            return hidden
        return hidden * distributed.full_tensor(self.log_scale).exp().to(hidden.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.vocab_size)
        return vocab_embedding(ids, self._tables[0])

    def logits(self, hidden: Tensor) -> Tensor:
        return vocab_logits(self._scaled(hidden), self._tables[1])

    def loss(self, hidden: Tensor, targets: Tensor, **options: Unpack[LossOptions]) -> Tensor:
        return linear_cross_entropy(self._scaled(hidden), self._tables[1], targets, **options)

    def materialize(self) -> tuple[Tensor, Tensor]:
        E, head = (distributed.full_tensor(table.detach()) for table in self._tables)
        return E.clone(), self._scaled(head).detach().T.clone(memory_format=torch.contiguous_format)

    def reset_parameters(self) -> None:
        """Draw new tables from torch's default generator, as in the constructor.

        Also initializes a module from the meta device, after ``to_empty``. Parameters may be DTensors sharded by rows: with
        the same seed, ranks get the values that one process would draw.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "log_scale":
                    parameter.zero_()
                else:
                    distributed.sharded_normal_(parameter).mul_(self.std)


class Untied(_PlainTables):
    """Separate tables: E = ``embedding`` (V, d), W_out = ``head``ᵀ, head (V, d); both N(0, std²) initially.

    Args:
        vocab_size: V.
        hidden_size: d.
        std: standard deviation of the initial tables.
        logit_scale: multiply the logits by a learned exp(``log_scale``), initially 1.
    """

    _names = "embedding", "head"

    def __init__(
        self, vocab_size: int, hidden_size: int, *, std: float = INITIAL_STD, logit_scale: bool = False
    ) -> None:
        super().__init__(vocab_size, hidden_size, std, logit_scale)
        self.embedding = nn.Parameter(torch.randn(vocab_size, hidden_size) * std)
        self.head = nn.Parameter(torch.randn(vocab_size, hidden_size) * std)


class TransposeTying(_PlainTables):
    """One table for both sides: E = ``weight`` (V, d), W_out = Eᵀ (Press and Wolf 2017), N(0, std²) initially.

    Args:
        vocab_size: V.
        hidden_size: d.
        std: standard deviation of the initial table.
        logit_scale: multiply the logits by a learned exp(``log_scale``), initially 1.
        input_gradient_scale: multiplies the lookup's part of the table's gradient, which the head's part otherwise
            outweighs (arXiv 2603.26663). The values do not change.

    Raises:
        ValueError: input_gradient_scale negative or not finite.
    """

    _names = "weight", "weight"

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
        # Between equals: the rows, and a part of the gradient.
        return rows.detach().lerp(rows, self.input_gradient_scale)
