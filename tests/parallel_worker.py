"""What tests/huggingface/test_huggingface_parallel.py runs in each of two processes: a few steps in parallel.

Run as ``python parallel_worker.py FOLDER``; writes ``FOLDER/RANK.json``.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from huggingface_models import V, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing import start_processes

import manifold_tying as mt
from manifold_tying.tying import shard_model

PROCESSES, STEPS, ROWS = 2, 4, 4


def losses(model: Any, accelerator: Any, rank: int, size: int) -> list[float]:
    model = accelerator.prepare(model.train()) if accelerator else model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = accelerator.prepare(optimizer) if accelerator else optimizer
    rows = torch.randint(3, V, (ROWS, 12), generator=torch.Generator().manual_seed(0))
    mine, found = rows[rank * ROWS // size : (rank + 1) * ROWS // size], []
    for _ in range(STEPS):
        loss = model(input_ids=mine, labels=mine).loss
        accelerator.backward(loss) if accelerator else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def work(rank: int, out: Path, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    found: dict[str, list[float]] = {}
    for kind in ("ddp", "fsdp"):
        AcceleratorState._reset_state(True)
        plugin = None
        if kind == "fsdp":
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        found[kind] = losses(mt.convert(build()), accelerator, rank, PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    model = mt.convert(build())
    found["shard_model"] = losses(shard_model(model, mesh, blocks=model.model.layers), None, rank, PROCESSES)
    with pytest.raises(ValueError, match="call the model, which gathers"):
        model.get_input_embeddings()(torch.tensor([rank]))
    model = mt.convert(build())  # torch's tensor parallelism of embedding and head: every process has the whole batch
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    columns = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"model.embed_tokens": rows, "lm_head": columns})
    model.lm_head.weight = model.model.embed_tokens.weight
    found["tensor parallel"] = losses(model, None, 0, 1)
    (out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(work, (Path(sys.argv[1]), port), PROCESSES, start_method="fork")
