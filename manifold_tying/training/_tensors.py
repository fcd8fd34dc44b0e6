"""The tensors of a checkpoint: safetensors files, whole or in the shards of several processes; never a pickle."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from manifold_tying.training._files import Damaged, digest, flush_to_disk


def write_tensors(draft: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """One file per part, by this process alone; returns the digest of each."""
    for name, tensors in parts.items():
        write_file(tensors, draft / name)
    return {name: digest(draft / name) for name in parts}


def write_shards(
    draft: Path, parts: Mapping[str, Mapping[str, Tensor]], rank: int, group: dist.ProcessGroup | None
) -> dict[str, str]:
    """One file per process of the group with its shards of all parts; returns the digests of this process's files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        writer = dcp.HuggingFaceStorageWriter(str(draft), save_distributed=True)
        tensors = {k: v for part in parts.values() for k, v in part.items()}
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # on every process, with what went wrong on each
        raise OSError(f"cannot write {draft}: {next(iter(error.failures.values()))[0]}") from error
    mine = list(draft.glob(f"shard-{rank + 1:05d}-*"))
    for file in mine:
        flush_to_disk(file)
    return {file.name: digest(file) for file in mine}


def read_shapes(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape, over all shards, and dtype of every tensor in the folder."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    try:
        metadata: dict[str, Any] = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except SafetensorError as error:
        raise Damaged(f"checkpoint {path} is damaged: {error}") from error
    return {name: (found.size, found.properties.dtype) for name, found in metadata.items()}


def read_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Read this process's part of each tensor; no process waits for another."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)


def write_file(tensors: Mapping[str, Tensor], file: Path) -> None:
    """One safetensors file, on disk when this returns; OSError where that cannot be."""
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, file)
    except SafetensorError as error:
        raise OSError(f"cannot write {file}: {error}") from error
    flush_to_disk(file)
