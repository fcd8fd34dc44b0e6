"""What tests/huggingface/test_huggingface_accelerate.py runs in each process: a few steps of a model below accelerate.

Run as ``python accelerate_worker.py OUT`` in the environment of torchrun; each rank writes its losses to OUT/KIND-RANK.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from huggingface_models import V, build

import manifold_tying as mt

STEPS, ROWS = 4, 4


def batches() -> torch.Tensor:
    return torch.randint(3, V, (STEPS, ROWS, 12), generator=torch.Generator().manual_seed(0))


def losses(model: Any, accelerator: Any, rank: int, size: int) -> list[float]:
    model = accelerator.prepare(model.train()) if accelerator else model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = accelerator.prepare(optimizer) if accelerator else optimizer
    found = []
    for rows in batches():
        mine = rows[rank * ROWS // size : (rank + 1) * ROWS // size]
        loss = model(input_ids=mine, labels=mine).loss
        accelerator.backward(loss) if accelerator else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main(out: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
        found = {name: losses(make(build()), accelerator, rank, size) for name, make in MAKERS.items()}
        (out / f"{kind}-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


MAKERS: dict[str, Any] = {"stock": lambda model: model, "converted": mt.convert}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
