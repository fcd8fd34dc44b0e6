"""What test_parallel_training.py runs in each of four processes: ``python training_worker.py FOLDER``.

Groups of 2, 3 and 4 of them train one after another, so that one start of the interpreter serves them all. (A start of its own
all the same: DTensor remembers the groups of equal meshes, and those of distributed_worker.py are gone by then.) Writes
what went wrong where it should to ``FOLDER/RANK.json``.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from torch.multiprocessing import start_processes
from training_runs import RUNS, STEPS, config

from manifold_tying import cli
from manifold_tying.training import AblateConfig, ablate, loop, saving, train
from manifold_tying.training.build import build_model

PATIENCE = timedelta(seconds=880)  # processes wait while smaller groups work
PROCESSES = 4
SIZES = (2, 3, 4)


@contextmanager
def group(size: int, rank: int, store: dist.Store, name: str) -> Iterator[None]:
    """The first ``size`` processes as the default group."""
    own = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=PATIENCE)
    yield
    dist.barrier()
    dist.destroy_process_group()


def train_while_saving(run: Any) -> None:
    """Train with this process's checkpoint of step 6 held up until the metrics of step 8 have been written."""
    gone_on = Event()
    real = saving.write_shards

    def hold(draft: Path, *rest: Any) -> dict[str, str]:
        assert dist.get_rank() or gone_on.wait(60), "no step was taken while the checkpoint was being written"
        return real(draft, *rest)

    def observe(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 8:
            gone_on.set()

    with mock.patch.object(saving, "write_shards", hold):
        train(run, observer=observe)


def said(run: Callable[[], Any]) -> str:
    """What the error says, or the status of the exit."""
    try:
        run()
    except (ValueError, OSError, SystemExit) as error:
        return str(error)
    return "nothing"


def errors(folder: Path, corpus: Path, rank: int) -> dict[str, str]:
    """Of two processes, one of which has or meets something that the other has not."""
    found = {}
    real = build_model

    def poisoned(run: Any) -> Any:
        model = real(run)
        if rank != 1 or run.interface == "transpose":
            return model
        if run.settings.parallel == "ddp":
            weight = dict(model.named_parameters())["blocks.1.mlp.down.weight"]
            weight.register_hook(lambda grad: grad * float("nan"))
        else:  # FSDP2 has other parameters
            down = model.get_submodule("blocks.1.mlp.down")
            down.register_forward_hook(lambda module, args, out: out * float("nan"))
        return model

    vars(loop)["build_model"] = poisoned
    try:
        for parallel in ("ddp", "fsdp"):
            run = config(folder / f"nan {parallel}", corpus, parallel=parallel)
            found[f"nan {parallel}"] = said(lambda run=run: train(run))  # type: ignore[misc]
        settings = config(folder, corpus, steps=2, parallel="ddp").settings
        rows = ablate(AblateConfig(out=folder / "ablation", arms="untied,transpose", seeds=1, settings=settings))
        found["ablation"] = json.dumps(rows)
    finally:
        vars(loop)["build_model"] = real
    for parallel, full in (("ddp", 0), ("fsdp", 1)):  # the process whose disk is full

        def fill(draft: Path, *rest: Any, full: int = full) -> dict[str, str]:
            if rank == full:
                raise OSError(28, "No space left on device")
            return {}

        run = config(folder / f"full {parallel}", corpus, parallel=parallel)
        with mock.patch.multiple(saving, write_tensors=fill, write_shards=fill):
            found[f"full {parallel}"] = said(lambda run=run: train(run))  # type: ignore[misc]
    found["again"] = said(lambda: train(config(folder / "fsdp 2", corpus, parallel="fsdp")))
    found["none"] = said(lambda: train(config(folder / "none", corpus, parallel="none")))
    found["few"] = said(lambda: train(config(folder / "few", corpus, batch_size=1)))
    dist.barrier()
    damaged = folder / "damaged"
    if rank == 0:
        shutil.copytree(folder / "fsdp 2", damaged)
        file = next((damaged / "checkpoints/step-00000012").glob("shard-00002*"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    by_name = config(damaged, corpus, parallel="fsdp", resume_from="step-00000012")
    found["damaged"] = said(lambda: train(by_name))
    dist.barrier()
    found["recovered"] = said(lambda: train(config(damaged, corpus, parallel="fsdp", resume=True)))
    dist.barrier()

    def terminate(metrics: dict[str, Any], step: int = 3) -> None:
        if metrics["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = config(folder / "terminated", corpus, parallel="fsdp", resume=True)
    found["terminated"] = said(lambda: train(stopped, observer=terminate))
    found["after"] = said(lambda: train(stopped))
    # In the last step, before its evaluation; and when everything is done.
    late = config(folder / "terminated late", corpus, parallel="fsdp", resume=True)
    found["late"] = said(lambda: train(late, observer=partial(terminate, step=STEPS - 1)))
    found["after late"] = said(lambda: train(late, observer=partial(terminate, step=STEPS)))
    return found


def command(rank: int, store: dist.Store, out: Path, corpus: Path) -> None:
    """The run "ddp" by the command line, in the environment that torchrun makes."""
    if rank == 0:  # the server runs before its port is known: a free port that is only looked up could be taken by then
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("port of the command", str(server.port))
    port = store.get("port of the command").decode()
    environment = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    settings = config(out, corpus).settings
    names = "preset data steps batch_size sequence_length val_tokens eval_every checkpoint_every lr".split()
    options = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(settings, name)))]
    with mock.patch.dict(os.environ, environment):
        cli.main(["train", "--out", str(out), "--interface", "pit-trainable", "--parallel", "ddp", *options])


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    corpus = folder / "sums.txt"
    found: dict[str, str] = {}
    if rank < 2:
        command(rank, store, folder / "ddp 2", corpus)
    for size in SIZES:
        if rank >= size:
            continue
        with group(size, rank, store, f"group of {size}"):
            for name, (sizes, interface, settings) in RUNS.items():
                if size in sizes and name != "ddp":
                    print(name, size, flush=True)
                    run = config(folder / f"{name} {size}", corpus, interface, **settings)
                    if (name, size) == ("fsdp", 2):  # from whose step 6 the others go on
                        train_while_saving(run)
                    else:
                        train(run)
            if size == 2:
                found = errors(folder, corpus, rank)
            else:
                name, parallel = ("poet-fsdp", "ddp") if size == 3 else ("fsdp", "fsdp")
                copy = folder / f"{name} 2 at {size}"
                if rank == 0:
                    shutil.copytree(folder / f"{name} 2", copy)
                dist.barrier()
                _, interface, settings = RUNS[name]
                settings = {**settings, "parallel": parallel}
                train(config(copy, corpus, interface, resume_from="step-00000006", **settings))
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    # Forks, so that four processes pay for one import; of torch._dynamo, too, which the first optimizer imports.
    start_processes(main, (Path(sys.argv[1]),), nprocs=PROCESSES, start_method="fork")
