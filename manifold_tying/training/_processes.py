"""The processes that share a run: how they start, which part of a batch each processes, and what they agree on."""

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

from manifold_tying.training._files import Damaged
from manifold_tying.training._hugging_face_model import Model
from manifold_tying.training.config import Settings
from manifold_tying.training.sections import Parallel
from manifold_tying.tying import shard_model

if TYPE_CHECKING:  # importing it takes as long as half of torch
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
LossOf = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def process_group(settings: Settings) -> Iterator[None]:
    """Inside, the processes that torchrun started know of each other; nothing to do where this is the only one."""
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
    """The processes of a run as one of them sees it. The default is a process alone, for which nothing here costs anything."""

    kind: Parallel = "none"
    rank: int = 0
    size: int = 1
    mesh: "DeviceMesh | None" = None
    group: dist.ProcessGroup | None = None  # in which they talk; None is the default group

    @classmethod
    def of(cls, settings: Settings) -> "Processes":
        """All processes of the default group; ValueError where their number and ``settings.parallel`` do not go together."""
        size = dist.get_world_size() if dist.is_initialized() else 1
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 and started > 1:  # each would do all of it, into the same folder
            raise ValueError(
                f"{started} processes were started that know nothing of each other; train and ablate share their work, start "
                "anything else without torchrun, and call torch.distributed.init_process_group first in a program of your own"
            )
        kind = settings.parallel or ("none" if size == 1 else "fsdp")
        if (kind == "none") != (size == 1):
            raise ValueError(
                f"parallel={kind} does not go with {size} process{'es' * (size > 1)}; "
                + ("start several with torchrun" if size == 1 else "choose ddp, fsdp or hsdp")
            )
        if settings.batch_size // settings.accumulate < size:
            raise ValueError(
                f"expected a sequence for each of {size} processes in batch_size / accumulate, got {settings.batch_size} / "
                f"{settings.accumulate}; enlarge batch_size or lower accumulate"
            )
        if settings.compile and kind in ("fsdp", "hsdp"):
            raise ValueError(f"compile goes with parallel none and ddp, got {kind}; leave one of the two out")
        if size == 1:
            return cls()
        if settings.init_from is not None:
            raise ValueError(f"init_from works in one process, got {size}; start it without torchrun")
        return cls(kind, dist.get_rank(), size, _mesh(kind, size, torch.device(settings.device).type))

    def apart(self, timeout: float) -> "Processes":
        """The same processes with a group of their own, for one other thread of each; all of them call it."""
        if self.size == 1:
            return self
        return replace(self, group=dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo"))

    def leave(self) -> None:
        """Give up the group of :meth:`apart`, when all processes are done with it."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes metrics, events and reports."""
        return self.rank == 0

    def place(self, model: Model, compiled: bool) -> LossOf:
        """Distribute the model, in place, and return what computes its loss."""
        if self.kind in ("fsdp", "hsdp"):
            return shard_model(model, self.mesh, blocks=model.blocks).loss
        loss_of = torch.compile(model.loss) if compiled else model.loss
        if self.kind == "ddp":
            with warnings.catch_warnings():  # torch 2.13 has another word for it, which 2.11 does not know
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                # A buffer is POET's W0, which every process computes alike.
                return DistributedDataParallel(_LossModule(model, loss_of), broadcast_buffers=False)
        return loss_of

    def share(self, part: Tensor) -> Tensor:
        """This process's sequences of a part of a batch; shares differ by one where they must."""
        return part if self.size == 1 else part.tensor_split(self.size)[self.rank]

    def total(self, value: Tensor) -> Tensor:
        """The sum over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def any(self, value: bool) -> bool:
        """Whether the value is true on one of the processes."""
        return any(self.gather(value))

    def together(self, work: Callable[[], T]) -> T:
        """``work()`` on every process; where it raises ValueError or OSError on one, all raise, Damaged as Damaged."""
        if self.size == 1:
            return work()
        error: ValueError | OSError | None = None
        try:
            value = work()
        except (ValueError, OSError) as raised:
            error = raised
        found = self.gather(None if error is None else (str(error), isinstance(error, Damaged)))
        # All raise one error, the first: what is done about it has to be the same everywhere.
        for rank, of_rank in enumerate(found):
            if of_rank is not None:
                message, damaged = of_rank
                if error is not None and isinstance(error, Damaged) == damaged:
                    raise error
                raise (Damaged if damaged else ValueError)(message if rank == 0 else f"process {rank}: {message}")
        return value

    def gather(self, value: T) -> list[T]:
        """The small values of all processes."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def on_first(self, work: Callable[[], object]) -> None:
        """``work()`` on the process that writes, whose result stays there; its ValueError or OSError on all."""
        self.together(work if self.writes else lambda: None)

    def first(self, work: Callable[[], T]) -> T:
        """``work()`` on the process that writes, its small result on all; its ValueError or OSError on all, too."""
        result: Any = self.together(work if self.writes else lambda: None)
        return self.gather(result)[0]


def without_sync(loss_of: LossOf, wanted: bool) -> AbstractContextManager[None]:
    """Inside, DDP adds up gradients without sending them, where that is wanted."""
    return loss_of.no_sync() if wanted and isinstance(loss_of, DistributedDataParallel) else nullcontext()


@contextmanager
def gathered(*modules: nn.Module) -> Iterator[None]:
    """Inside, FSDP2's shards below the modules are whole parameters, on every process; all of them have to come along."""
    groups: list[Any] = [group for module in modules for group in module.modules() if hasattr(group, "unshard")]
    for group in groups:
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()


class _LossModule(nn.Module):
    """DDP calls forward alone."""

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
