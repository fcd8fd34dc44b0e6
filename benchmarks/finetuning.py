"""Adapters beside each other on two generated tasks: loss, exact match, forgetting, time. Table of docs/finetuning.md.

    manifold-tying train --preset nano --interface transpose --steps 600 --data stdlib --out runs/base
    python -m benchmarks.finetuning runs/base            # trains what the results lack, then prints the table
    python -m benchmarks.finetuning                      # prints the table

Each method has five rates on seed 0 of each task, then three seeds at the rate with the lowest validation loss. All see the
same batches. The adapters are on all linear layers of the blocks, with block sizes and ranks that give about as many parameters
as LoRA of rank 8. The loss is that of the answer's tokens. Forgetting is the rise of the loss on held-out text of the base
model's corpus. "kept" is what autograd keeps for the backward of one batch, weights not counted.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import tyro
from peft import BOFTConfig, LoraConfig, OFTConfig, get_peft_model
from tokenizers import Tokenizer
from torch import Tensor, nn

from benchmarks._command import ROOT, commit
from experiments.comparison import markdown_table
from experiments.problems import THINGS, Problem, problems
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.peft import PoetConfig, StiefelLoraConfig
from manifold_tying.training import load_model
from manifold_tying.training.data import open_tokens, prepare
from manifold_tying.training.data.tokenize import separator_id
from manifold_tying.training.machine import machine

STEPS, BATCH, TEST, WARMUP = 200, 16, 200, 20
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SEEDS = (0, 1, 2)
POINTS_RATE = 0.3  # of U and V, as a multiple of the rate of s
TARGETS = r"blocks\.\d+\.(attention|mlp)\.(query|key|value|output|gate|up|down)"
METHODS: dict[str, Callable[[], Any]] = {
    "LoRA, r 8": lambda: LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS),
    "DoRA, r 8": lambda: LoraConfig(r=8, lora_alpha=16, use_dora=True, target_modules=TARGETS),
    "Stiefel LoRA, r 8": lambda: StiefelLoraConfig(r=8, lora_alpha=16, target_modules=TARGETS),
    "OFT, b 32": lambda: OFTConfig(r=0, oft_block_size=32, target_modules=TARGETS),
    "BOFT, b 16": lambda: BOFTConfig(boft_block_size=16, target_modules=TARGETS),
    "POET, b 32, one side": lambda: PoetConfig(block_size=32, sides="in", target_modules=TARGETS),
    "POET, b 16, both sides": lambda: PoetConfig(block_size=16, target_modules=TARGETS),
}


@dataclass(frozen=True)
class Options:
    """What to train on, and where the results are."""

    base: Annotated[Path | None, tyro.conf.Positional] = None
    """Folder of a run of train."""
    results: Path = ROOT / "benchmarks/results/finetuning-cpu.json"
    steps: int = STEPS


def reversals(count: int, seed: int) -> list[Problem]:
    """(four words, the words in the opposite order), all different."""
    draw = np.random.default_rng(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        words = [THINGS[i] for i in draw.permutation(len(THINGS))[:4]]
        found[f"{' '.join(words)} reversed:"] = f" {' '.join(words[::-1])}"
    return list(found.items())


TASKS: dict[str, tuple[list[Problem], list[Problem]]] = {
    "sums": (problems(1_900, 0, "training"), problems(TEST, 0, "in-domain")),
    "reversal": ((drawn := reversals(1_900 + TEST, 0))[TEST:], drawn[:TEST]),
}


class Base:
    """The pretrained model, its tokenizer and held-out text of its corpus."""

    def __init__(self, run: Path) -> None:
        self.model = cast(Any, load_model(run))
        file = run / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(file))
        self.end = separator_id(self.tokenizer, str(file))
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        directory = prepare(config["data"], vocab_size=self.model.config.vocab_size)
        self.text = torch.from_numpy(open_tokens(directory).val[: 64 * 129].astype("int64")).view(64, 129)

    def encoded(self, pairs: list[Problem]) -> list[tuple[list[int], list[int]]]:
        def ids(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        return [([self.end, *ids(question)], [*ids(answer), self.end]) for question, answer in pairs]


def batch_of(pairs: list[tuple[list[int], list[int]]], end: int) -> tuple[Tensor, Tensor]:
    """(ids, targets), padded; the question does not count."""
    longest = max(len(question) + len(answer) for question, answer in pairs)
    ids, targets = torch.full((len(pairs), longest), end), torch.full((len(pairs), longest), -100)
    for row, (question, answer) in enumerate(pairs):
        whole = torch.tensor([*question, *answer])
        ids[row, : len(whole)] = whole
        targets[row, len(question) - 1 : len(whole) - 1] = torch.tensor(answer)
    return ids, targets


@torch.no_grad()
def exact_match(model: Any, pairs: list[tuple[list[int], list[int]]], end: int) -> float:
    """Share of the answers that greedy decoding gives, the end included; each token computes its whole context."""
    by_length = defaultdict(list)
    for question, answer in pairs:
        by_length[len(question)].append((question, answer))
    right = 0
    for group in by_length.values():
        ids, wanted = torch.tensor([question for question, _ in group]), [answer for _, answer in group]
        start = ids.shape[1]
        for _ in range(max(map(len, wanted))):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        right += sum(
            row[start : start + len(answer)] == answer for row, answer in zip(ids.tolist(), wanted, strict=True)
        )
    return right / len(pairs)


def kept_bytes(loss: Callable[[], Tensor], parameters: set[int]) -> int:
    """Bytes that autograd keeps for the backward, without parameters and buffers."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return sum(found.values())


def finetune(base: Base, task: str, method: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    train, test = (base.encoded(pairs) for pairs in TASKS[task])
    torch.manual_seed(seed)
    adapted: Any = get_peft_model(deepcopy(base.model), METHODS[method]())
    model = adapted.get_base_model()
    groups = param_groups(model, manifold_lr=POINTS_RATE * rate)
    optimizer = RiemannianAdam(groups, lr=rate)
    peaks = [group["lr"] for group in optimizer.param_groups]
    order = np.random.default_rng(seed)
    times = []
    for step in range(steps):
        ids, targets = batch_of([train[i] for i in order.integers(len(train), size=BATCH)], base.end)
        factor = min(1.0, (step + 1) / WARMUP) * (1 - step / steps)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        try:
            optimizer.step()
        except ValueError as error:  # a gradient is not finite
            print(f"{method} at {rate:g} diverged after {step} steps: {error}"[:200], flush=True)
            break
        times.append(time.perf_counter() - began)
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = kept_bytes(lambda: model.loss(ids, targets), weights)
    model.eval()
    with torch.no_grad():
        validation = model.loss(*batch_of(test, base.end)).item()
        forgotten = (
            model.loss(base.text[:, :-1], base.text[:, 1:]) - base.model.loss(base.text[:, :-1], base.text[:, 1:])
        ).item()
    return {
        "task": task, "method": method, "rate": rate, "seed": seed, "loss": validation, "forgetting": forgotten,
        "exact_match": exact_match(model, test, base.end), "step_ms": 1e3 * statistics.median(times), "kept_bytes": kept,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }  # fmt: skip


def train_all(options: Options) -> None:
    assert options.base is not None
    base, path = Base(options.base), options.results
    found = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    done = {(row["task"], row["method"], row["rate"], row["seed"]): row for row in found}

    def measured(task: str, method: str, rate: float, seed: int) -> dict[str, Any]:
        key = (task, method, rate, seed)
        if key not in done:
            done[key] = finetune(base, *key, options.steps)
            print(done[key], flush=True)
            content = {"commit": commit(), "machine": machine(torch.device("cpu")), "rows": [*done.values()]}
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return done[key]

    for task in TASKS:
        for method in METHODS:
            best = min(RATES, key=lambda rate: finite(measured(task, method, rate, 0)["loss"]))
            for seed in SEEDS[1:]:
                measured(task, method, best, seed)


def finite(value: float) -> float:
    return value if np.isfinite(value) else float("inf")


def table(rows: list[dict[str, Any]]) -> str:
    tables = []
    for task in dict.fromkeys(row["task"] for row in rows):
        body = []
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [row for row in rows if (row["task"], row["method"]) == (task, method)]
            best = min((row for row in own if row["seed"] == 0), key=lambda row: finite(row["loss"]))["rate"]
            runs = [row for row in own if row["rate"] == best]

            def cell(key: str, factor: float, digits: int, runs: list[dict[str, Any]] = runs) -> str:
                values = [factor * row[key] for row in runs]
                spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
                return f"{statistics.mean(values):.{digits}f}{spread}"

            body.append([
                f"`{method}`", f"{runs[0]['parameters']:,}", cell("loss", 1, 3), cell("exact_match", 100, 1),
                cell("forgetting", 1, 3), f"{min(row['step_ms'] for row in own):.1f}", f"{runs[0]['kept_bytes'] / 1e6:.1f}",
                f"{best:g}",
            ])  # fmt: skip
        head = [
            task,
            "parameters",
            "loss (nats)",
            "exact match (%)",
            "forgetting (nats)",
            "step (ms)",
            "kept (MB)",
            "rate",
        ]
        tables.append(markdown_table(head, body))
    return "\n\n".join(tables)


def trials(rows: list[dict[str, Any]]) -> str:
    """Loss and forgetting at each rate on seed 0."""
    body = []
    for task, method in dict.fromkeys((row["task"], row["method"]) for row in rows):
        own = {row["rate"]: row for row in rows if (row["task"], row["method"], row["seed"]) == (task, method, 0)}
        cells = [f"{own[rate]['loss']:.2f} / {own[rate]['forgetting']:.2f}" if rate in own else "" for rate in RATES]
        body.append([task, f"`{method}`", *cells])
    return markdown_table(["task", "loss / forgetting on seed 0", *(f"{rate:g}" for rate in RATES)], body, left=2)


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    if options.base is not None:
        train_all(options)
    rows = json.loads(options.results.read_text(encoding="utf-8"))["rows"]
    print(f"{table(rows)}\n\n{trials(rows)}")


if __name__ == "__main__":
    main()
