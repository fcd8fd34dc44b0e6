"""Any order of training, saving, loading, resharding, merging and failing: the weights are those of an undisturbed run."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed_models import batch, build
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from manifold_tying import distributed
from manifold_tying._safetensors import read_into, whole_shapes
from manifold_tying.models import Llama
from manifold_tying.optim import MergeSchedule, RiemannianAdam, param_groups
from manifold_tying.training import checkpoint as reading
from manifold_tying.training import saving
from manifold_tying.training.files import digest, flush_to_disk
from manifold_tying.tying import shard_model

MOST, MERGE_EVERY = 12, 3
CONFIG = {"what": "a test"}


class Trained:
    """A model with POET's rotations, its optimizer and its clock; under FSDP2 where ``sharded``."""

    def __init__(self, sharded: bool) -> None:
        self.model: Llama = build("poet")
        if sharded:
            shard_model(self.model, DeviceMesh("cpu", [0]), blocks=self.model.blocks)
        self.optimizer = RiemannianAdam(param_groups(self.model), lr=3e-2)
        self.schedule = MergeSchedule(self.model, self.optimizer, MERGE_EVERY)
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model.loss(*batch(self.steps)).backward()
        self.optimizer.step()
        self.schedule.step()
        self.steps += 1

    def tensors(self) -> dict[str, Tensor]:
        return {k: distributed.full_tensor(v.detach()).clone() for k, v in self.model.state_dict().items()}


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, Tensor]]:
    """The weights after 0, 1, 2, ... steps."""
    trained = Trained(sharded=False)
    found = [trained.tensors()]
    for _ in range(MOST):
        trained.step()
        found.append(trained.tensors())
    part = "blocks.0.mlp.up.parametrizations.weight.0.ordered_base"
    assert not torch.equal(found[MERGE_EVERY][part], found[0][part])  # merges change W0, or nothing would be at stake
    return found


class Checkpoints(RuleBasedStateMachine):
    """The folder of a run, in which anything happens."""

    expected: list[dict[str, Tensor]]

    def __init__(self) -> None:
        super().__init__()
        self.run = Path(mkdtemp())
        self.trained = Trained(sharded=False)

    def teardown(self) -> None:
        shutil.rmtree(self.run)

    def saved(self) -> list[Path]:
        return reading.checkpoints(self.run)

    def save(self) -> Path:
        t = self.trained
        staged = saving.stage_checkpoint(t.steps, t.model, t.optimizer, CONFIG, schedule=t.schedule)
        return saving.write_checkpoint(self.run, staged)

    @rule(count=st.integers(1, 4))
    def train(self, count: int) -> None:
        for _ in range(min(count, MOST - self.trained.steps)):
            self.trained.step()

    @rule()
    def save_whole(self) -> None:
        path = self.save()
        assert path.name == f"step-{self.trained.steps:08d}"
        assert len(self.saved()) <= saving.KEPT

    @precondition(lambda self: self.saved())
    @rule(sharded=st.booleans(), which=st.integers(0, saving.KEPT - 1))
    def resume(self, sharded: bool, which: int) -> None:
        path = self.saved()[max(-1 - which, -len(self.saved()))]
        new = Trained(sharded)
        new.steps = reading.load_checkpoint(path, new.model, new.optimizer, CONFIG, schedule=new.schedule)
        assert path.name == f"step-{new.steps:08d}" and new.schedule.steps == new.steps
        reading.set_newer_aside(path)
        self.trained = new

    @precondition(lambda self: self.saved())
    @rule(processes=st.integers(1, 4))
    def reshard(self, processes: int) -> None:
        split(self.saved()[-1], processes)

    @rule(moment=st.integers(0, 6), at_the_name=st.booleans())
    def fail_to_save(self, moment: int, at_the_name: bool) -> None:
        """A disk that is full at one of its writes, or that refuses the name: there are the old ones, or also the new one."""
        before = [path.name for path in self.saved()]
        new = f"step-{self.trained.steps:08d}"
        with full_disk(moment, at_the_name=at_the_name) as reached:
            try:
                self.save()
            except OSError:
                assert reached()
                assert [path.name for path in self.saved()] in (before, sorted({*before, new}))

    @precondition(lambda self: self.saved())
    @rule(place=st.floats(0, 1), file=st.integers(0, 10), bit=st.integers(0, 7))
    def flip_a_bit(self, place: float, file: int, bit: int) -> None:
        path = self.saved()[-1]
        files = sorted(path.iterdir())
        damaged = files[file % len(files)]
        content = damaged.read_bytes()
        at = min(int(place * len(content)), len(content) - 1)
        damaged.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        new = Trained(sharded=False)
        before = new.tensors()
        with pytest.raises(ValueError, match=r"checkpoint .*step-") as error:
            reading.load_checkpoint(path, new.model, new.optimizer, CONFIG, schedule=new.schedule)
        older = self.saved()[:-1]
        if older and "damaged" in str(error.value):
            assert f"--resume-from {older[-1].name}" in str(error.value)
        assert all(torch.equal(v, before[k]) for k, v in new.tensors().items()) and not new.optimizer.state
        damaged.write_bytes(content)

    @invariant()
    def weights_are_those_of_an_undisturbed_run(self) -> None:
        expected = self.expected[self.trained.steps]
        for name, tensor in self.trained.tensors().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)

    @invariant()
    def every_checkpoint_is_whole(self) -> None:
        for path in self.saved():
            reading.check_files(path, reading.read_state(path))


@contextmanager
def full_disk(moment: int, *, at_the_name: bool) -> Iterator[Any]:
    """The ``moment``-th flush, or the renaming, fails."""
    calls = [0]
    real = flush_to_disk

    def flush(path: Path) -> None:
        calls[0] += 1
        if calls[0] > moment:
            raise OSError(28, "No space left on device")
        real(path)

    def rename(*paths: Path) -> None:
        calls[0] += moment + 1
        raise OSError(30, "Read-only file system")

    patched = (
        mock.patch.object(os, "replace", rename) if at_the_name else mock.patch.object(saving, "flush_to_disk", flush)
    )
    with patched:
        yield lambda: calls[0] > moment


def split(path: Path, processes: int) -> None:
    """Save a checkpoint again as so many processes would: rows in torch.chunk's shares, with their place beside them."""
    state = reading.read_state(path)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in whole_shapes(path).items()}
    read_into(path, tensors)
    for file in path.glob("*.safetensors"):
        file.unlink()
    files = {}
    for rank in range(processes):
        own, places = {}, {}
        for name, tensor in tensors.items():
            rows = tensor.chunk(processes) if tensor.ndim else (tensor,)
            if rank < len(rows):
                own[name] = rows[rank].clone()
                first = sum(len(part) for part in rows[:rank]) if tensor.ndim else 0
                places[name] = {"saved_offsets": [first] + [0] * (tensor.ndim - 1) if tensor.ndim else []}
        file = path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(own, file, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
        assert load_file(file).keys() == own.keys()
        files[file.name] = digest(file)
    saving._write_state(path, {**state, "files": files})


def test_any_order_of_events_ends_where_an_undisturbed_run_does(undisturbed: list[dict[str, Tensor]]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        Checkpoints.expected = undisturbed
        machine: Any = Checkpoints.TestCase
        machine.settings = settings(
            max_examples=10, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
        )
        machine().runTest()
    finally:
        dist.destroy_process_group()
