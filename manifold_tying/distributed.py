"""Matrices whose rows are sharded over ranks: DTensors, as FSDP2 makes them.

A product YᵀZ is the sum of the ranks' local products, so any formula of p x p products takes all-reduces of p x p and never
needs another rank's rows. Formulas are written once, for the local rows and a ``reduce`` that sums over the ranks; for an
unsharded matrix ``reduce`` does nothing.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor, in place if possible, over the ranks that share the rows of a matrix; returns the sum."""

_DRAW_SIZE = 2**22


def no_reduce(A: Tensor) -> Tensor:
    """The ``reduce`` of an unsharded matrix."""
    return A


def is_dtensor(X: object) -> "TypeGuard[DTensor]":
    """Whether X is a DTensor. Duck-typed: importing DTensor takes 0.5 s."""
    return hasattr(X, "device_mesh")


def to_local(X: Tensor) -> Tensor:
    """The local shard of a DTensor, sharing memory; any other tensor itself."""
    return X.to_local() if is_dtensor(X) else X


def shard_like(full_tensor: Tensor, X: Tensor) -> Tensor:
    """This rank's part of ``full_tensor``, which every rank holds, if X is a DTensor; otherwise ``full_tensor`` itself."""
    if not is_dtensor(X):
        return full_tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full_tensor, X.device_mesh, X.placements, src_data_rank=None).to_local()


def reshard_fsdp(model: torch.nn.Module) -> None:
    """Make FSDP2 restore the sharded parameters, if a forward without a backward left the gathered copies in place.

    Writes to the copies would be lost, and an optimizer does not know them.
    """
    for module in model.modules():
        if hasattr(module, "unshard") and hasattr(module, "reshard"):  # FSDPModule, without importing it
            cast(Any, module).reshard()


def full_tensor(X: Tensor) -> Tensor:
    """Gather a DTensor on every rank, a collective call; any other tensor itself."""
    return X.full_tensor() if is_dtensor(X) else X


def row_reduce(X: Tensor) -> Reduce:
    """A function that sums p x p matrices over the ranks that share the rows of X (..., n, p)."""
    if not is_dtensor(X):
        return no_reduce
    check_row_sharding(X)
    placed = enumerate(X.placements)
    return _reduce_over([X.device_mesh.get_group(i) for i, at in placed if getattr(at, "dim", None) == X.ndim - 2])


def mesh_reduce(tensors: Iterable[Tensor]) -> Reduce:
    """A function that sums a tensor over all ranks of the meshes of these DTensors; :func:`no_reduce` if there are none."""
    meshes = dict.fromkeys(X.device_mesh for X in tensors if is_dtensor(X))
    return _reduce_over([group for mesh in meshes for group in mesh.get_all_groups()])


def _reduce_over(groups: "list[ProcessGroup]") -> Reduce:
    def reduce(A: Tensor) -> Tensor:
        A = A.contiguous()
        for group in groups:
            torch.distributed.all_reduce(A, group=group)
        return A

    return reduce if groups else no_reduce


def check_row_sharding(X: Tensor, what: str = "matrix") -> None:
    """ValueError for a DTensor (..., n, p) that is not replicated or sharded by rows or by leading dimensions."""
    for placement in getattr(X, "placements", ()):
        dim = getattr(placement, "dim", None)
        if not (placement.is_replicate() or (dim is not None and 0 <= dim <= X.ndim - 2)):
            raise ValueError(
                f"expected the {what} of shape {tuple(X.shape)} to be sharded by rows, Shard({X.ndim - 2}), or replicated, "
                f"got {placement}: sharded columns cannot be kept orthonormal by one all-reduce. Shard dimension {X.ndim - 2} "
                "(with fully_shard, by its shard_placement_fn)"
            )


def row_local_map(f: Callable[..., Tensor], X: Tensor, *others: Tensor) -> Tensor:
    """f(reduce, X, *others) on this rank's rows, for f whose value has X's shape; a DTensor if X is one.

    A DTensor gets no gradient. ValueError unless the others have X's placement.
    """
    if not is_dtensor(X):
        return f(no_reduce, X, *others)
    for other in others:
        if getattr(other, "placements", None) != X.placements or getattr(other, "device_mesh", None) != X.device_mesh:
            raise ValueError(
                f"expected tensors distributed alike, got {X.placements} on {X.device_mesh} and "
                f"{getattr(other, 'placements', 'a plain tensor')}; redistribute them, or take .full_tensor() of all"
            )
    with torch.no_grad():
        return from_local_like(X, f(row_reduce(X), to_local(X), *(to_local(other) for other in others)))


def from_local_like(X: Tensor, part: Tensor) -> Tensor:
    """A DTensor of X's shape and placement from this rank's part; the part itself if X is not a DTensor."""
    if not is_dtensor(X):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, X.device_mesh, X.placements, run_check=False, shape=X.shape, stride=X.stride())


@torch.no_grad()
def sharded_normal_(X: Tensor) -> Tensor:
    """Fill X (n, p) with standard normal numbers from torch's default CPU generator; returns X.

    With the same seed, ranks of a DTensor sharded by rows get bit for bit the rows that one process would draw: each draws
    all numbers, one block of rows at a time, and keeps its own.
    """
    if not is_dtensor(X):
        return X.copy_(torch.randn(X.shape, dtype=X.dtype, device=X.device if X.is_meta else "cpu"))
    mine, first = to_local(X), row_offset(X)
    n, p = X.shape
    # Blocks of a multiple of 16 numbers give the same sequence as one draw, if the last block has at least 16.
    block = max(16, _DRAW_SIZE // p // 16 * 16)
    start = 0
    while start < n:
        stop = n if n - start < block + 16 else start + block
        drawn = torch.randn(stop - start, p, dtype=X.dtype, device="cpu")
        low, high = max(start, first), min(stop, first + len(mine))
        if low < high:
            mine[low - first : high - first] = drawn[low - start : high - start]
        start = stop
    return X


def row_offset(X: "DTensor") -> int:
    """Global number of the first local row of the DTensor X (n, p), whose rows at most one mesh dimension shards."""
    check_row_sharding(X)
    sharding = [i for i, placement in enumerate(X.placements) if placement.is_shard(0)]
    if X.ndim != 2 or len(sharding) > 1 or not all(p.is_replicate() or p.is_shard(0) for p in X.placements):
        raise ValueError(f"expected a matrix with rows sharded once, got {tuple(X.shape)} with {X.placements}")
    if not sharding:
        return 0
    processes, rank = X.device_mesh.size(sharding[0]), X.device_mesh.get_local_rank(sharding[0])
    return min(len(X), rank * -(-len(X) // processes))
