"""Distributed training: the process group, each rank's part of a batch, and errors that every rank raises together."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manifold_tying.poet import cached_weights
from manifold_tying.training.config import Settings
from manifold_tying.training.files import Damaged
from manifold_tying.training.hf_model import Model
from manifold_tying.training.sections import Parallel
from manifold_tying.tying import shard_model

if TYPE_CHECKING:  # importing it takes half as long as importing torch
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
LossOf = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def process_group(settings: Settings) -> Iterator[None]:
    """Initialize torch.distributed for the processes that torchrun started. Does nothing for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    backend = "gloo"
    if torch.device(settings.device).type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        local = int(os.environ["LOCAL_RANK"])
        if settings.device != "cuda" or local >= torch.cuda.device_count():
            raise ValueError(
                f"expected --device cuda and a CUDA device for each process of the node, got {settings.device} and "
                f"{torch.cuda.device_count()} devices for process {local}; start as many processes as there are devices"
            )
        torch.cuda.set_device(local)
    dist.init_process_group(backend, timeout=timedelta(seconds=settings.timeout))
    yield
    dist.destroy_process_group()  # not after an error: it would wait for processes that may be gone


@dataclass(frozen=True)
class Processes:
    """The ranks of a run. The default is a single process, in which no method communicates."""

    kind: Parallel = "none"
    rank: int = 0
    size: int = 1
    mesh: "DeviceMesh | None" = None
    group: dist.ProcessGroup | None = None  # None is the default group

    @classmethod
    def from_settings(cls, settings: Settings) -> "Processes":
        """The ranks of the default group; raises ValueError if ``settings.parallel`` does not fit their number."""
        size = dist.get_world_size() if dist.is_initialized() else 1
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 and started > 1:  # every process would do the same run in the same folder
            raise ValueError(
                f"WORLD_SIZE is {started}, but torch.distributed is not initialized. Only the commands train and ablate run "
                "under torchrun; in your own program call torch.distributed.init_process_group first"
            )
        kind = settings.parallel or ("none" if size == 1 else "fsdp")
        if (kind == "none") != (size == 1):
            raise ValueError(
                f"parallel={kind} does not work with {size} process{'es' * (size > 1)}; "
                + ("start several with torchrun" if size == 1 else "choose ddp, fsdp or hsdp")
            )
        if settings.batch_size // settings.accumulate < size:
            raise ValueError(
                f"expected batch_size / accumulate >= {size}, one sequence per process, got {settings.batch_size} / "
                f"{settings.accumulate}; enlarge batch_size or lower accumulate"
            )
        if settings.compile and kind in ("fsdp", "hsdp"):
            raise ValueError(f"compile needs parallel none or ddp, got {kind}; leave one of the two out")
        if size == 1:
            return cls()
        if settings.init_from is not None:
            raise ValueError(f"init_from needs a single process, got {size}; start it without torchrun")
        return cls(kind, dist.get_rank(), size, _mesh(kind, size, torch.device(settings.device).type))

    def with_own_group(self, timeout: float) -> "Processes":
        """The same ranks with their own process group, for a second thread. Collective."""
        if self.size == 1:
            return self
        return replace(self, group=dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo"))

    def close(self) -> None:
        """Destroy the group of :meth:`with_own_group`."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the files."""
        return self.rank == 0

    def wrap(self, model: Model, compiled: bool) -> LossOf:
        """Shard or replicate the model in place and return its loss function."""
        if self.kind in ("fsdp", "hsdp"):
            return shard_model(model, self.mesh, blocks=model.blocks).loss
        own = torch.compile(model.loss) if compiled else model.loss

        def loss_of(ids: Tensor, targets: Tensor) -> Tensor:
            with cached_weights(model) if ids.is_cuda else nullcontext():
                return own(ids, targets)

        if self.kind == "ddp":
            with warnings.catch_warnings():  # torch 2.13 renamed it; 2.11 lacks the new name
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                # The buffers are POET's W0, which every rank computes identically.
                return DistributedDataParallel(_LossModule(model, loss_of), broadcast_buffers=False)
        return loss_of

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def any(self, value: bool) -> bool:
        """Whether the value is true on any rank."""
        return any(self.all_gather(value))

    def raise_together(self, work: Callable[[], T]) -> T:
        """Run ``work()`` on every rank. If one raises ValueError or OSError, all raise it; Damaged stays Damaged."""
        if self.size == 1:
            return work()
        error: ValueError | OSError | None = None
        try:
            value = work()
        except (ValueError, OSError) as raised:
            error = raised
        found = self.all_gather(None if error is None else (str(error), isinstance(error, Damaged)))
        # All ranks raise the first error, so that all react in the same way.
        for rank, of_rank in enumerate(found):
            if of_rank is not None:
                message, damaged = of_rank
                if error is not None and isinstance(error, Damaged) == damaged:
                    raise error
                raise (Damaged if damaged else ValueError)(message if rank == 0 else f"process {rank}: {message}")
        return value

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks; they are pickled, so keep them small."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def on_main(self, work: Callable[[], object]) -> None:
        """Run ``work()`` on rank 0; raise its ValueError or OSError on all ranks."""
        self.raise_together(work if self.is_main else lambda: None)

    def from_main(self, work: Callable[[], T]) -> T:
        """Run ``work()`` on rank 0; return its result, or raise its ValueError or OSError, on all ranks."""
        found: list[Any] = self.all_gather(self.raise_together(work if self.is_main else lambda: None))
        result: T = found[0]
        return result


ALONE = Processes()


def without_sync(loss_of: LossOf, wanted: bool) -> AbstractContextManager[None]:
    """DDP's ``no_sync`` if wanted: gradients accumulate without communication."""
    return loss_of.no_sync() if wanted and isinstance(loss_of, DistributedDataParallel) else nullcontext()


@contextmanager
def gathered(*modules: nn.Module) -> Iterator[None]:
    """Gather FSDP2's shards of the modules into full parameters while inside. Collective."""
    groups: list[Any] = [group for module in modules for group in module.modules() if hasattr(group, "unshard")]
    for group in groups:
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()


class _LossModule(nn.Module):
    """DDP hooks ``forward`` only."""

    def __init__(self, model: Model, loss_of: LossOf) -> None:
        super().__init__()
        self.model = model
        self._loss_of = loss_of

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self._loss_of(ids, targets)


def _mesh(kind: Parallel, size: int, device: str) -> "DeviceMesh | None":
    from torch.distributed.device_mesh import init_device_mesh

    if kind == "fsdp":
        return init_device_mesh(device, (size,))
    if kind == "hsdp":
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        shards = per_node if per_node < size else size // 2 if size % 2 == 0 else size
        if size % shards or size == shards:
            raise ValueError(f"hsdp needs nodes of the same size, or an even number of processes on one; got {size}")
        return init_device_mesh(device, (size // shards, shards), mesh_dim_names=("replicate", "shard"))
    return None
