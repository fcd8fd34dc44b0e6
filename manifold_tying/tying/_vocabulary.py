"""A rank's rows of a vocabulary table, and the reductions over the ranks that share the table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from manifold_tying import autograd, distributed


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """ValueError unless ids are int32 or int64; IndexError for one that the table lacks, if that is known without a sync."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"expected int64 or int32 token ids, got {ids.dtype}; convert them with ids.long()")
    known = ids.device.type == "cpu" and autograd.has_data(ids) and ids.numel()
    if known and not torch.compiler.is_compiling() and not autograd.in_transform():
        low, high = ids.aminmax()
        if low < 0 or high >= vocab_size:
            wrong = int(low if low < 0 else high)
            raise IndexError(f"expected token ids from 0 to {vocab_size - 1}, got {wrong}; check the tokenizer")


@dataclass(frozen=True)
class VocabularyShard:
    """This rank has rows ``first`` to ``first + rows`` of ``total``, the ranks of ``group`` the others; None: not sharded."""

    total: int
    rows: int
    first: int = 0
    group: Any = None

    @classmethod
    def of(cls, table: Tensor) -> "VocabularyShard":
        """The shard of a table (V, d); ValueError for a DTensor whose rows are not sharded exactly once."""
        if not distributed.is_dtensor(table):
            return cls(len(table), len(table))
        first = distributed.row_offset(table)
        sharding = [i for i, placement in enumerate(table.placements) if placement.is_shard(0)]
        if not sharding:
            placements = table.placements
            raise ValueError(f"expected the rows of the table to be sharded, got {placements}; see shard_vocabulary")
        return cls(len(table), len(table.to_local()), first, table.device_mesh.get_group(sharding[0]))

    @property
    def world_size(self) -> int:
        """Number of ranks that share the table."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def index(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Local row numbers of token ids, and whether each row is local; the number is arbitrary if it is not.

        IndexError for an id that no rank has, if that can be checked without a sync.
        """
        if self.group is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        check_ids(ids, self.total)
        index = ids - self.first
        return index.clamp(0, max(0, self.rows - 1)), (index >= 0) & (index < self.rows)

    def gather(self, x: Tensor, index: Tensor, is_local: Tensor) -> Tensor:
        """x (n, rows) at the index (n, 1), 0 if the row is not local."""
        return x.gather(1, index) * is_local if self.rows else x.sum(1, keepdim=True)

    def max(self, x: Tensor) -> Tensor:
        """The maximum of each row (n, 1) over all ranks."""
        largest = x.amax(1, keepdim=True) if self.rows else x.new_full((len(x), 1), -torch.inf)
        if self.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        return largest

    def all_reduce(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Sums over all ranks, by one all-reduce."""
        if self.group is None:
            return parts
        joined = torch.stack(parts) if len(parts) > 1 else parts[0].contiguous()[None]
        dist.all_reduce(joined, group=self.group)
        return joined.unbind()

    def copy_to_ranks(self, x: Tensor) -> Tensor:
        """Identity in the forward, all-reduce in the backward, for a tensor that every rank uses with its rows."""
        return x if self.group is None else _CopyToRanks.apply(x, self)

    def reduce_from_ranks(self, x: Tensor) -> Tensor:
        """All-reduce in the forward, identity in the backward, for a tensor that every rank then uses alike."""
        return x if self.group is None else _ReduceFromRanks.apply(x, self)


def vocab_logits(hidden: Tensor, table: Tensor) -> Tensor:
    """hidden tableᵀ, (..., V), in hidden's dtype; a DTensor sharded by vocabulary for a DTensor sharded by rows."""
    if not distributed.is_dtensor(table):
        return F.linear(hidden, table.to(hidden.dtype))
    from torch.distributed.tensor import DTensor, Shard

    columns = [Shard(hidden.ndim - 1) if placement.is_shard() else placement for placement in table.placements]
    x = VocabularyShard.of(table).copy_to_ranks(hidden)
    shape = torch.Size((*hidden.shape[:-1], len(table)))
    return DTensor.from_local(
        F.linear(x, distributed.to_local(table).to(hidden.dtype)),
        table.device_mesh,
        columns,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vocabulary: VocabularyShard) -> Tensor:
        ctx.vocabulary = vocabulary
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ReduceFromRanks.apply(grad, ctx.vocabulary), None


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vocabulary: VocabularyShard) -> Tensor:
        ctx.vocabulary = vocabulary
        return vocabulary.all_reduce(x.clone())[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _CopyToRanks.apply(grad, ctx.vocabulary), None


def vocab_embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of a table (V, d) at ids (...), (..., d); for a DTensor sharded by rows, by one all-reduce of the result.

    All ranks must look up the same ids.
    """
    if not distributed.is_dtensor(table):
        return F.embedding(ids, table)
    vocabulary, rows = VocabularyShard.of(table), distributed.to_local(table)
    index, is_local = vocabulary.index(ids)
    found = F.embedding(index, rows) if len(rows) else rows.sum(0).expand(*ids.shape, -1)  # keeps the graph connected
    return vocabulary.reduce_from_ranks(found * is_local[..., None])


def distinct_rows(ids: Tensor, table: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """f(rows of a table at ids (...)), (..., d), for f that maps rows (n, d) one by one.

    f is applied once to each distinct token. On GPUs and in compiled code, where counting them would sync, it is applied to
    every looked-up row, or to the full table if that is smaller (not by torch.export, for any number of tokens).
    """
    countable = autograd.has_data(ids) and not autograd.in_transform() and not torch.compiler.is_compiling()
    if ids.device.type == "cpu" and countable:
        rows, index = ids.unique(return_inverse=True)
        return F.embedding(index, f(vocab_embedding(rows, table)))
    if not autograd.is_exporting() and ids.numel() > len(table) and not distributed.is_dtensor(table):
        # A view: Dynamo refuses one tensor as two arguments of a Function.
        return F.embedding(ids, f(table.view_as(table)))
    return f(vocab_embedding(ids.flatten(), table)).reshape(*ids.shape, table.shape[1])
