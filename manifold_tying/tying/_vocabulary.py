"""The rows of a vocabulary's table that a process has, and what the processes add up where each has some of them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from manifold_tying import linalg


@dataclass(frozen=True)
class Vocabulary:
    """Rows ``first`` to ``first + rows`` of a table are here, the others with the processes of ``group``; None: all here."""

    rows: int
    first: int = 0
    group: Any = None
    total: int = 0

    @classmethod
    def of(cls, table: Tensor) -> "Vocabulary":
        """That of a table (V, d); ValueError for a DTensor whose rows are not sharded exactly once."""
        if not linalg.is_dtensor(table):
            return cls(len(table))
        first, dtensor = linalg.row_offset(table), table
        placements, mesh = dtensor.placements, dtensor.device_mesh  # type: ignore[attr-defined]
        sharding = [i for i, placement in enumerate(placements) if placement.is_shard(0)]
        if not sharding:
            raise ValueError(f"expected the rows of the table to be sharded, got {placements}; see shard_vocabulary")
        return cls(len(linalg.to_local(table)), first, mesh.get_group(sharding[0]), len(table))

    @property
    def processes(self) -> int:
        """How many have a share."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def index(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the rows at hand for token ids, and whether each is at hand; some row's number where it is not.

        IndexError for an id that no process has, where the numbers can be looked at without waiting for a GPU.
        """
        if self.group is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        known = ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling()
        if known and not 0 <= ids.min() <= ids.max() < self.total:
            raise IndexError(
                f"expected token ids from 0 to {self.total - 1}, got some from {ids.min()} to {ids.max()}; check the tokenizer"
            )
        index = ids - self.first
        return index.clamp(0, max(0, self.rows - 1)), (index >= 0) & (index < self.rows)

    def pick(self, x: Tensor, index: Tensor, here: Tensor) -> Tensor:
        """x (n, rows) at the index (n, 1), 0 where it is not here."""
        return x.gather(1, index) * here if self.rows else x.sum(1, keepdim=True)

    def largest(self, x: Tensor) -> Tensor:
        """The largest entry of each row (n, 1) on all processes."""
        largest = x.amax(1, keepdim=True) if self.rows else x.new_full((len(x), 1), -torch.inf)
        if self.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        return largest

    def add(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """The sums over all processes, by one all-reduce."""
        if self.group is None:
            return parts
        joined = torch.stack(parts) if len(parts) > 1 else parts[0].contiguous()[None]
        dist.all_reduce(joined, group=self.group)
        return joined.unbind()

    def shared(self, x: Tensor) -> Tensor:
        """The same tensor, used by every process for its rows; its gradient is the sum of what they find."""
        return x if self.group is None else _SumGradients.apply(x, self)

    def summed(self, x: Tensor) -> Tensor:
        """:meth:`add` of one tensor, differentiable; what comes after it is the same on every process."""
        return x if self.group is None else _Sum.apply(x, self)


def scores(hidden: Tensor, table: Tensor) -> Tensor:
    """hidden tableᵀ, (..., V), the table in hidden's dtype; for a DTensor sharded by rows a DTensor sharded by vocabulary."""
    if not linalg.is_dtensor(table):
        return F.linear(hidden, table.to(hidden.dtype))
    from torch.distributed.tensor import DTensor, Shard

    parts: Any = table
    columns = [Shard(hidden.ndim - 1) if placement.is_shard() else placement for placement in parts.placements]
    x = Vocabulary.of(table).shared(hidden)
    shape = torch.Size((*hidden.shape[:-1], len(table)))
    return DTensor.from_local(
        F.linear(x, linalg.to_local(table).to(hidden.dtype)),
        parts.device_mesh,
        columns,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vocabulary: Vocabulary) -> Tensor:
        ctx.vocabulary = vocabulary
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.vocabulary), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vocabulary: Vocabulary) -> Tensor:
        ctx.vocabulary = vocabulary
        return vocabulary.add(x.clone())[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumGradients.apply(grad, ctx.vocabulary), None


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of a table (V, d) at ids (...), (..., d); of a DTensor sharded by rows by one all-reduce of the result.

    Its processes all look up the same ids.
    """
    if not linalg.is_dtensor(table):
        return F.embedding(ids, table)
    return _Lookup.apply(ids, linalg.to_local(table), Vocabulary.of(table))


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, rows: Tensor, vocabulary: Vocabulary) -> Tensor:
        index, here = vocabulary.index(ids)
        ctx.save_for_backward(index, here)
        ctx.shape = rows.shape  # what lies here of (V, d)
        ctx.vocabulary = vocabulary
        found = rows[index] * here[..., None] if len(rows) else rows.new_zeros(*ids.shape, rows.shape[1])
        return vocabulary.add(found)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        if not ctx.needs_input_grad[1]:
            return None, None, None
        # What comes after the lookup is the same on every process, and so is its gradient: each takes that of its rows.
        index, here = ctx.saved_tensors
        found = (ctx.vocabulary.shared(grad) * here[..., None]).flatten(0, -2)
        if not ctx.shape[0]:  # still connected: a second derivative is a collective
            return None, found[:0], None
        return None, found.new_zeros(ctx.shape).index_add_(0, index.flatten(), found), None
