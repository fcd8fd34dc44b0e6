"""Effect of clipping after a merge on the loss: a constant norm, ten times the norm for ten steps, and MergeSchedule's ramp.

    python -m benchmarks.merge_clip --out benchmarks/results/merge-clip.json

A small Llama with POET's blocks trains on the bytes of the standard library's source. The arms of a seed share weights, batches
and merges; only the clipping norm differs.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

import manifold_tying as mt
from benchmarks._command import commit
from manifold_tying.models import Llama, LlamaConfig
from manifold_tying.optim import MergeSchedule, RiemannianAdam, param_groups
from manifold_tying.training.data.corpus import open_corpus
from manifold_tying.training.machine import machine

WARMUP = 40
CORPUS = 4_000_000  # bytes
HELD_OUT = 64  # batches
Policy = Callable[[MergeSchedule, float], float]


@dataclass(frozen=True)
class Options:
    """Settings of the experiment."""

    steps: int = 400
    every: int = 100
    """Steps between merges."""
    seeds: int = 3
    norms: tuple[float, ...] = (0.1, 1.0)
    """Clipping norms."""
    hidden_size: int = 64
    block_size: int = 32
    lr: float = 4e-3
    """Peak rate of all other parameters."""
    body_lr: float = 4e-3
    """Peak rate of the skew vectors."""
    batch_size: int = 8
    sequence_length: int = 64
    out: Path | None = None
    """JSON file to write."""


def _constant(schedule: MergeSchedule, norm: float) -> float:
    return norm


def _tenfold(schedule: MergeSchedule, norm: float) -> float:
    """Another reading of the paper."""
    return 10 * norm if schedule.steps >= schedule.every and schedule.steps % schedule.every < 10 else norm


POLICIES: dict[str, Policy] = {"constant": _constant, "ten times the norm": _tenfold, "ramp": MergeSchedule.clip}


def read_corpus() -> Tensor:
    """The first bytes of the standard library's source, with files in a fixed random order."""
    text = bytearray()
    documents = ["".join(parts) for parts in open_corpus("stdlib").documents()]
    for i in torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).tolist():
        text += documents[i].encode()
        if len(text) >= CORPUS:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:CORPUS]


def batches(corpus: Tensor, options: Options, seed: int) -> Iterator[Tensor]:
    """Random windows, one byte longer than a sequence."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(options.sequence_length + 1)
    while True:
        starts = torch.randint(len(corpus) - len(offsets), (options.batch_size, 1), generator=generator)
        yield corpus[starts + offsets].long()


def train(corpus: Tensor, options: Options, seed: int, norm: float, policy: Policy) -> float:
    """The held-out loss of one run, in nats per byte."""
    torch.manual_seed(seed)
    d = options.hidden_size
    config = LlamaConfig(
        vocab_size=256, hidden_size=d, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=-(-8 * d // 24) * 8
    )
    model = Llama(config, mt.Untied(256, d, std=0.06))
    mt.equivalence_(
        model, "blocks.*", block_size=options.block_size, terms=2, init="normalized", seed=seed, verbose=False
    )
    rates = {"blocks.*.parametrizations.weight.original": {"lr": options.body_lr}}
    optimizer = RiemannianAdam(param_groups(model, overrides=rates), options.lr, (0.9, 0.95))
    peaks = [group.get("lr", options.lr) for group in optimizer.param_groups]
    schedule = MergeSchedule(model, optimizer, options.every)
    split = len(corpus) * 9 // 10
    for step, ids in zip(range(options.steps), batches(corpus[:split], options, seed), strict=False):
        cosine = 0.55 + 0.45 * math.cos(math.pi * max(0, step - WARMUP) / max(1, options.steps - WARMUP))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1, (step + 1) / WARMUP) * cosine
        optimizer.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), policy(schedule, norm))
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        held_out = zip(range(HELD_OUT), batches(corpus[split:], options, seed=0), strict=False)
        return statistics.fmean(model.loss(ids[:, :-1], ids[:, 1:]).item() for _, ids in held_out)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    corpus, rows = read_corpus(), []
    print("| norm | clipping after a merge | held-out loss, by seed | mean |\n|---:|---|---|---:|", flush=True)
    for norm in options.norms:
        for name, policy in POLICIES.items():
            losses = [round(train(corpus, options, seed, norm, policy), 4) for seed in range(options.seeds)]
            rows.append({"norm": norm, "clipping": name, "losses": losses})
            shown = " / ".join(f"{loss:.3f}" for loss in losses)
            print(f"| {norm:g} | {name} | {shown} | {statistics.fmean(losses):.3f} |", flush=True)
    if options.out is not None:
        settings = {key: value for key, value in asdict(options).items() if key != "out"}
        result = {"settings": settings, "machine": machine(torch.device("cpu")), "commit": commit(), "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
