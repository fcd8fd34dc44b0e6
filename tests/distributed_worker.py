"""What tests/processes/test_distributed.py runs in each of four processes.

Groups of 1, 2, 3 and 4 of the processes do the same work, so that one start of the interpreter serves them all. Run as
``python distributed_worker.py FOLDER``; writes ``FOLDER/RANK.json``.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_models import (
    KINDS,
    PROCESSES,
    RUNS,
    SHAPES,
    SOME,
    V,
    build,
    gradient,
    move,
    points,
    steps_of,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.multiprocessing import start_processes

import manifold_tying as mt
from manifold_tying import distributed, linalg
from manifold_tying.manifolds import Of
from manifold_tying.models import Llama
from manifold_tying.optim import MergeSchedule, RiemannianAdam, RiemannianMuon, RiemannianSGD, param_groups
from manifold_tying.tying import shard_model, shard_vocabulary

PATIENCE = timedelta(seconds=880)  # processes wait while smaller groups work


class Group:
    """The first ``size`` processes, as this one of them sees it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mesh = DeviceMesh("cpu", torch.arange(size))
        self.rank = dist.get_rank()

    @property
    def member(self) -> bool:
        return self.rank < self.size

    def share(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.size)[self.rank]

    def mean(self, loss: Tensor) -> Tensor:
        loss = loss.clone()
        dist.all_reduce(loss, group=self.mesh.get_group())
        return loss / self.size

    def rows(self, X: Tensor) -> Tensor:
        return distribute_tensor(X, self.mesh, [Shard(0)], src_data_rank=None)


class LossModule(nn.Module):
    """DDP calls forward alone."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(ids, targets)


def trained(arm: str, layout: str, group: Group) -> dict[str, Any]:
    model, steps = build(arm), range(steps_of(layout))
    if layout == "vocabulary":
        shard_vocabulary(model.interface, group.mesh)
        losses = train(model, model.loss, steps=steps)
    elif layout == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(
            LossModule(model), process_group=group.mesh.get_group(), broadcast_buffers=False
        )
        losses = train(model, wrapped, group.mean, group.share, steps)
    else:
        if layout == "checkpointed":
            checkpoint_blocks(model)
        shard_model(model, group.mesh, blocks=model.blocks if layout == "checkpointed" else ())
        losses = train(model, model.loss, group.mean, group.share, steps)
    result: dict[str, Any] = {"losses": losses}
    if isinstance(model.interface, mt.PIT):
        Z = distributed.full_tensor(model.interface.memory.detach())
        result["defect"] = linalg.defect(Z).item()
        result["sharded defect"] = linalg.defect(model.interface.memory).item()
    if arm == "poet":
        mlp: Any = model.blocks[0].mlp
        part = mlp.up.parametrizations.weight[0]
        result["order"] = part.out_places.tolist()
        result["base"] = part.base.flatten()[:20].tolist()
    return result


def checkpoint_blocks(model: Llama) -> None:
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)


def moved(group: Group) -> dict[str, Any]:
    """How far points sharded by rows end from where whole ones do, and the size of every all-reduce on the way."""
    results: dict[str, Any] = {}
    for shape in SHAPES:
        start = points(shape)
        for kind in KINDS:
            expected = move(start, kind)
            with counted() as sums:
                ends = move(start, kind, group.rows)
            results[f"{shape} {kind}"] = {
                "error": max(largest(distributed.full_tensor(X) - Y) for X, Y in zip(ends, expected, strict=True)),
                "way": min(largest(X - Y) for X, Y in zip(start, expected, strict=True)),
                "defect": max(linalg.defect(X).item() for X in ends),
                "sums": sums,
            }
    return results


def largest(A: Tensor) -> float:
    return A.abs().max().item()


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many numbers each collective moves; anything but an all-reduce counts as -1."""
    sums: list[int] = []
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "scatter")
    originals = {name: getattr(dist, name) for name in names}

    def wrap(name: str) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sums.append(tensor.numel() if name == "all_reduce" else -1)
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, wrap(name))
    try:
        yield sums
    finally:
        for name in names:
            setattr(dist, name, originals[name])


def scaled_parameters(group: Group) -> dict[str, list[float]]:
    """How far sharded ordinary parameters with a scale end from where whole ones do, and how far those moved."""
    shape, results = (9, 5), {}
    scale = 10 ** torch.linspace(-2, 1, 45).view(shape)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": RiemannianAdam, "sgd": partial(RiemannianSGD, momentum=0.9), "muon": RiemannianMuon
    }  # fmt: skip
    for (name, kind), dim in itertools.product(kinds.items(), (0, 1)):
        whole = nn.Parameter(torch.ones(shape))
        sharded = nn.Parameter(distribute_tensor(torch.ones(shape), group.mesh, [Shard(dim)], src_data_rank=None))
        for p in (whole, sharded):
            optimizer = kind([{"params": [p], "scale": scale}], lr=1e-2)
            for step in range(3):
                G = gradient(shape, step)
                p.grad = G if p is whole else distribute_tensor(G, group.mesh, [Shard(dim)], src_data_rank=None)
                optimizer.step()
        moved = whole.detach() - 1
        results[f"{name}, dimension {dim}"] = [
            largest(distributed.full_tensor(sharded.detach()) - 1 - moved),
            largest(moved),
        ]
    return results


def refusals(group: Group) -> dict[str, str]:
    """What each wrong use says."""
    X = points((9, 4))[0]
    said = {}

    def attempt(name: str, use: Callable[[], Any]) -> None:
        try:
            use()
            said[name] = "nothing"
        except (ValueError, IndexError) as error:
            said[name] = str(error)

    def optimize(X: Tensor, manifold: Any) -> RiemannianAdam:
        return RiemannianAdam([{"params": [nn.Parameter(X)], "manifold": manifold}])

    columns = distribute_tensor(X, group.mesh, [Shard(1)], src_data_rank=None)
    attempt("columns", lambda: optimize(columns, mt.Stiefel()))
    attempt("qr", lambda: optimize(group.rows(X), mt.Stiefel("qr")))
    attempt("spd", lambda: optimize(group.rows(torch.eye(4)), mt.SPD()))
    attempt("subclass", lambda: optimize(group.rows(X), type("Own", (mt.Stiefel,), {})()))
    attempt("mixed", lambda: mt.Stiefel().proju(group.rows(X), X))
    attempt("rank", lambda: mt.Stiefel().projx(group.rows(torch.ones(9, 4))))
    spd = nn.Sequential(mt.spd(nn.Linear(4, 4), "weight"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    attempt("policy", lambda: shard_model(spd, group.mesh, mp_policy=policy))
    sharded: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), mt.stiefel(nn.Linear(4, 4))), mesh=group.mesh)
    attempt("methods", lambda: shard_model(spd, group.mesh, methods=["losses"]))
    attempt("constrained after", lambda: mt.orthogonal(sharded[0]))
    attempt("materialized", lambda: mt.materialize(sharded))
    pit = shard_vocabulary(mt.PIT(9, 4), group.mesh)
    attempt("id", lambda: pit.embed(torch.tensor([1, 9])))
    return said


def merged_after_a_forward(group: Group) -> dict[str, float]:
    """FSDP2 leaves parameters gathered after a forward without a backward: nothing may be written to those."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7))
    mt.equivalence_(model, exclude=(), block_size=4, seed=1, verbose=False)
    fully_shard(model, mesh=group.mesh)
    x, found = torch.ones(3, 12), {}
    model(x)
    optimizer = RiemannianAdam(param_groups(model), lr=5e-2)
    schedule = MergeSchedule(model, optimizer, every=5)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            found["before"] = model(x).sum().item()
        merged = schedule.step()
    assert merged
    distributed.reshard_fsdp(model)
    vectors = [p for name, p in model.named_parameters() if name.endswith("original")]
    found["moments"] = sum(float(distributed.full_tensor(optimizer.state[p]["exp_avg"]).abs().sum()) for p in vectors)
    with torch.no_grad():
        found["after"] = model(x).sum().item()
    return found


def points_of_plain_parameters(group: Group) -> list[float]:
    """Defects after steps of an optimizer that was given parameters and no groups."""
    defects = []
    for name in ("layer", "interface", "vocabulary"):
        torch.manual_seed(0)
        if name == "layer":
            model: Any = fully_shard(nn.Sequential(mt.stiefel(nn.Linear(4, 9))), mesh=group.mesh)
        else:
            model = mt.PIT(13, 4, memory="trainable")
            model = shard_model(model, group.mesh) if name == "interface" else shard_vocabulary(model, group.mesh)
        optimizer = RiemannianAdam(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            ids = torch.arange(3)
            y = model(torch.randn(2, 4)) if name == "layer" else model.loss(model.embed(ids), ids)
            y.square().sum().backward()
            optimizer.step()
        (point,) = [p for p in model.parameters() if p.shape in ((9, 4), (13, 4))]
        defects.append(linalg.defect(point).item())
    return defects


def matrices_by_muon(group: Group) -> float:
    """How far ordinary matrices that FSDP2 shards end from whole ones, when Muon orthogonalizes their updates."""
    ends = []
    for shard in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3))
        optimizer = RiemannianMuon((fully_shard(model, mesh=group.mesh) if shard else model).parameters(), lr=0.1)
        for step in range(3):
            model(gradient((2, 4), step)).square().sum().backward()
            optimizer.step()
        ends.append([distributed.full_tensor(p.detach()) for p in model.parameters()])
    return max(largest(a - b) for a, b in zip(*ends, strict=True))


def states_of_stacks(folder: Path, group: Group) -> float:
    """One number per matrix, of matrices that lie on different processes: saved, loaded and gone on with."""

    def build_stack() -> Any:
        torch.manual_seed(0)
        model = nn.Bilinear(4, 9, 3, bias=False)  # three matrices of 4 x 9
        mt.stiefel(model)
        fully_shard(model, mesh=group.mesh)
        return model, RiemannianAdam(param_groups(model), lr=1e-2, second_moment="matrix")

    def steps(model: Any, optimizer: RiemannianAdam, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(number)
            x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 9, generator=generator)
            (model(x, y) * torch.tensor([1.0, 10.0, 100.0])).sin().sum().backward()
            optimizer.step()

    model, optimizer = build_stack()
    steps(model, optimizer, range(5))
    processes = group.mesh.get_group()
    kept: dict[str, Any] = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
    dcp.save(kept, checkpoint_id=folder, process_group=processes)
    steps(model, optimizer, range(5, 8))
    again, resumed_optimizer = build_stack()
    states: dict[str, Any] = dict(zip("mo", get_state_dict(again, resumed_optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder, process_group=processes)
    set_state_dict(again, resumed_optimizer, model_state_dict=states["m"], optim_state_dict=states["o"])
    steps(again, resumed_optimizer, range(5, 8))
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    return max(float((distributed.full_tensor(a) - distributed.full_tensor(b)).abs().max().detach()) for a, b in pairs)


def not_finite(group: Group) -> dict[str, Any]:
    """A NaN that only the last process has."""
    result = {}
    for nonfinite in ("raise", "skip"):
        p = nn.Parameter(group.rows(points((37, 12))[0]))
        other = nn.Parameter(group.rows(torch.ones(5, 2)))
        groups: list[dict[str, Any]] = [
            {"params": [p], "manifold": mt.Stiefel(), "names": ["Z"]},
            {"params": [other]},
        ]
        optimizer = RiemannianAdam(groups, nonfinite=nonfinite)
        G = gradient((37, 12), 0)
        G[-1, -1] = torch.nan
        before = [distributed.to_local(x).clone() for x in (p.detach(), other.detach())]
        p.grad, other.grad = group.rows(G), group.rows(torch.ones(5, 2))
        try:
            optimizer.step()
            said = ""
        except ValueError as error:
            said = str(error)
        after = [distributed.to_local(x) for x in (p.detach(), other.detach())]
        result[nonfinite] = {"said": said, "unchanged": all(map(torch.equal, before, after))}
    return result


def from_meta(arm: str, group: Group) -> dict[str, Any]:
    """Tables of an interface that was never whole anywhere."""
    with torch.device("meta"):
        model = build(arm)
    shard_model(model, group.mesh, blocks=model.blocks)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.interface.reset_parameters()  # type: ignore[operator]
    model.reset_parameters()
    E, W_out = model.interface.materialize()
    return {
        "E": E.tolist(),
        "W_out": W_out.tolist(),
        "body": distributed.full_tensor(model.get_parameter("blocks.0.attention.query.weight").detach()).tolist(),
        "types": [isinstance(p, DTensor) for p in model.parameters()],
    }


def constrained_layers_of(group: Group) -> dict[str, Any]:
    """Layers from the meta device that are reset while sharded, against whole ones; and one under a bfloat16 policy."""
    put_on: dict[str, Callable[[nn.Linear], Any]] = {
        "stiefel": mt.stiefel,
        "cayley": partial(mt.orthogonal, map="cayley"),
        "qr": partial(mt.orthogonal, map="qr"),
        "spd": partial(mt.spd, name="weight"),
        "doubly stochastic": partial(mt.doubly_stochastic, name="weight"),
        "low rank": partial(mt.low_rank, rank=2),
        "equal": partial(mt.low_rank, spectrum="equal"),
        "rows": partial(mt.sphere, radius=2.0),
        "matrix": partial(mt.sphere, of="matrix", radius=2.0),
        "equivalence": partial(mt.equivalence, block_size=4, seed=0),
    }
    found: dict[str, Any] = {}
    for kind, constrain in put_on.items():
        sizes = (8, 8) if kind in ("spd", "doubly stochastic") else (8, 12)
        whole = constrain(nn.Linear(*sizes, bias=False))
        with torch.device("meta"):
            model: Any = shard_model(nn.Sequential(constrain(nn.Linear(*sizes, bias=False))), group.mesh)
        model.to_empty(device="cpu")
        layers: list[Any] = [whole, model[0]]
        for layer in layers:
            torch.manual_seed(1)
            layer.reset_parameters()
        found[kind] = float((model(torch.eye(8)) - whole(torch.eye(8))).abs().max())
        model.reshard()
        with torch.no_grad():
            for p in (*whole.parameters(), *model.parameters()):
                p.mul_(1.25)
        model(torch.eye(8))  # leaves the gathered copies in place
        left = [max(mt.optim.drift(module).values(), default=0.0) for module in (whole, model)]
        assert left[0] > 0.1 or kind in ("cayley", "qr", "spd", "doubly stochastic", "equivalence")
        found[f"drift of {kind}"] = abs(left[1] - left[0])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    low = nn.Sequential(mt.PIT(20, 8, memory="trainable"), mt.stiefel(nn.Linear(8, 8)))
    found["dtype"] = str(shard_model(low, group.mesh, mp_policy=policy)(torch.arange(3)).dtype)
    return found


def spheres_of(group: Group) -> dict[str, Any]:
    """Steps of two sharded points with their own radii against the same of whole ones; and the sums of the last step."""
    result = {}
    generator = torch.Generator().manual_seed(0)
    for of, shape in itertools.product(get_args(Of), ((7, 3), (3, 7, 3))):  # rows or matrices are shared out
        manifolds = [mt.Sphere(of, mt.manifolds.norms(torch.rand(shape, generator=generator), of)) for _ in range(2)]
        starts = [manifold.projx(torch.randn(shape, generator=generator)) for manifold in manifolds]
        ends: list[Tensor] = []
        whole: Callable[[Tensor], Tensor] = torch.clone
        for place in (whole, group.rows):
            params: list[Any] = [nn.Parameter(place(X)) for X in starts]
            for p, manifold in zip(params, manifolds, strict=True):
                p.manifold = manifold
            optimizer = RiemannianAdam(params, lr=0.1)
            steps = torch.Generator().manual_seed(1)
            for _ in range(3):
                for p in params:
                    p.grad = place(torch.randn(shape, generator=steps))
                with counted() as sums:
                    optimizer.step()
            ends += [distributed.full_tensor(p.detach()) for p in params]
            assert all(m.check_point_on_manifold(p.detach()) for m, p in zip(manifolds, params, strict=True))
            assert not manifolds[0].check_point_on_manifold(place(1.01 * starts[0]))
        error = max(largest(ends[i] - ends[i + 2]) for i in range(2))
        result[f"{of} {len(shape)}"] = {"error": error, "way": largest(ends[0] - starts[0]), "sums": sums}
    return result


def low_precision(group: Group) -> dict[str, Any]:
    """The dtypes under a bfloat16 policy, of L and Z inside and of what the blocks see."""
    model = build("pit-trainable")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_model(model, group.mesh, blocks=model.blocks, mp_policy=policy)
    seen: dict[str, str] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, args: seen.update({name: str(args[0].dtype)})

    lists: Any = model.interface.parametrizations
    lists["memory"][0].register_forward_pre_hook(note("Z"))
    lists["cholesky_factor"][0].register_forward_pre_hook(note("L"))
    mlp: Any = model.blocks[0].mlp
    mlp.up.register_forward_pre_hook(note("up"))
    return {"losses": train(model, model.loss, group.mean, group.share, range(3)), "seen": seen}


OPTIONS: Any = {"z_loss": 0.1, "label_smoothing": 0.2, "softcap": 3.0}


def scores_of(group: Group) -> dict[str, Any]:
    """Logits, losses, their clipped gradients and tables with the vocabulary split, against whole ones."""
    result = {}
    for arm in ("transpose", "pit-trainable", "two rows"):  # of the latter a rank has one or none
        found = []
        for split in (False, True):
            torch.manual_seed(1)
            interface = build(arm).interface if arm != "two rows" else mt.TransposeTying(2, 1, std=1.0)
            if split:
                shard_vocabulary(interface, group.mesh)
                assert any(distributed.is_dtensor(p) for p in interface.parameters())
            seeded, d = torch.Generator().manual_seed(0), interface.hidden_size
            hidden = torch.randn(2, 3, d, generator=seeded, requires_grad=True)
            targets = torch.tensor([[0, interface.vocab_size - 1, 1], [-100, 1, 0]])
            logits = distributed.full_tensor(interface.logits(hidden))
            losses = interface.loss(hidden, targets, reduction="none", **OPTIONS)
            (logits.square().mean() + losses.square().sum() + interface.loss(hidden, targets, **OPTIONS)).backward()
            assert hidden.grad is not None
            with implicit_replication():
                norm = distributed.full_tensor(nn.utils.clip_grad_norm_(interface.parameters(), 1e-3))
            gradients = [distributed.full_tensor(p.grad) for p in interface.parameters() if p.grad is not None]
            found.append([logits.detach(), losses.detach(), hidden.grad, norm, *gradients, *interface.materialize()])
        result[arm] = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))
    return result


def second_derivatives_of(group: Group) -> dict[str, float]:
    """Gradients of the squared gradients of a loss with the vocabulary split, against whole tables."""
    result = {}
    ids = torch.randint(V, (2, 3), generator=torch.Generator().manual_seed(0))
    for arm in ("transpose", "pit-trainable"):
        found = []
        for split in (False, True):
            interface = build(arm).interface.double()
            if split:
                shard_vocabulary(interface, group.mesh)
            parameters = list(interface.parameters())
            loss = interface.loss(interface.embed(ids).tanh(), ids, **OPTIONS)
            first = torch.autograd.grad(loss, parameters, create_graph=True)
            total = torch.stack([distributed.full_tensor(g.square().sum()) for g in first]).sum()
            found.append([distributed.full_tensor(g) for g in torch.autograd.grad(total, parameters)])
        result[arm] = max(float((a - b).norm() / a.norm()) for a, b in zip(*found, strict=True))
    return result


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=PATIENCE)
    groups = [Group(size) for size in range(1, PROCESSES + 1)]
    results: dict[str, Any] = {}

    def run(name: str, group: Group, work: Callable[..., Any], *args: Any) -> None:
        if group.member:
            print(name, group.size, flush=True)
            results[f"{name} {group.size}"] = work(*args, group)

    two = groups[1]
    run("refusals", two, refusals)
    run("merged after a forward", two, merged_after_a_forward)
    run("plain parameters", two, points_of_plain_parameters)
    run("matrices by Muon", two, matrices_by_muon)
    run("scaled", two, scaled_parameters)
    run("stacks", two, states_of_stacks, folder / "stacks")
    run("low precision", two, low_precision)
    run("constrained", two, constrained_layers_of)
    run("spheres", two, spheres_of)
    run("pit-trainable checkpointed", two, trained, "pit-trainable", "checkpointed")
    for (arm, layout), sizes in RUNS.items():
        for size in sizes:
            run(f"{arm} {layout}", groups[size - 1], trained, arm, layout)
    for group in (groups[size - 1] for size in SOME):
        run("moved", group, moved)
        for arm in ("untied", "pit-trainable", "pit-free"):
            run(f"{arm} from meta", group, from_meta, arm)
        run("scores", group, scores_of)
        if torch.__version__ >= "2.13":  # before, DTensor.to_local had no second derivative
            run("second derivatives", group, second_derivatives_of)
        run("not finite", group, not_finite)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forks, so that four processes pay for one import; of torch._dynamo, too, which the first optimizer imports.
    start_processes(main, (Path(sys.argv[1]),), nprocs=PROCESSES, start_method="fork")
