"""PIT's Table 6: checkpoints adapted to word problems by LoRA, with exact match in and out of domain."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from experiments.comparison import Arm, Table, share, train_arms
from experiments.pit import TRANSPOSE
from experiments.problems import exact_match, problems, write_problems
from manifold_tying._json import read_object
from manifold_tying.huggingface import import_transformers
from manifold_tying.training.ablation import check_folder
from manifold_tying.training.config import Settings, TrainConfig, read_shape
from manifold_tying.training.files import write_atomic
from manifold_tying.training.hf_model import OUT
from manifold_tying.training.loop import train
from manifold_tying.training.progress import Started
from manifold_tying.training.recipes import resolve
from manifold_tying.training.rundir import RESULT, finite
from manifold_tying.training.sections import Interface

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RUN, PROBLEMS = "run", "problems.jsonl"
TRAINING, EVALUATED = 1_900, 600  # problems of every run, the same; evaluated in domain and out of it


def adaptation(
    checkpoint: Path,
    out: Path,
    *,
    interface: Interface,
    steps: int,
    seed: int,
    lora_rank: int = 8,
    lr: float | None = None,
    device: str = "cpu",
    **changes: Any,
) -> dict[str, Any]:
    """Train low-rank updates of a checkpoint's blocks on word problems, and count what it answers before and after.

    ``OUT/run`` holds the training run, ``OUT/run/model`` the adapted checkpoint, ``OUT/result.json`` the row. A folder with a
    row is not trained again; an unfinished one is resumed. As in every run of ``train``, the loss covers all tokens, question
    and answer. The problems do not depend on the seed, which sets the initial updates and the order of the data.

    Args:
        checkpoint: a transformers checkpoint with tied tables ("transpose", "untied"; the PIT arms convert it), or a converted
            one (the PIT arms).
        out: folder to write to.
        interface: the adapted model's. PIT's tables also train, but for the Z of "pit-frozen".
        steps: optimizer steps.
        seed: seed of the run.
        lora_rank: rank of the updates.
        lr: peak learning rate of the updates; None is the recipe's.
        device: cpu, cuda or cuda:N, for training and evaluation.
        changes: further fields of :class:`manifold_tying.training.Settings`.

    Returns:
        "interface", "seed", "in_domain", "out_of_domain" (exact match from 0 to 1 after training), "in_domain_before",
        "out_of_domain_before" (of the checkpoint itself), "val_loss" (nats per token of held-out training problems),
        "trainable_parameters".

    Raises:
        ValueError: what :func:`manifold_tying.training.train` refuses, or a folder that holds another run.
    """
    settings = Settings(
        init_from=checkpoint,
        data=f"jsonl:{out / PROBLEMS}",
        steps=steps,
        lora_rank=lora_rank,
        lr=lr,
        device=device,
        **changes,
    )
    run = resolve(TrainConfig(out=out / RUN, interface=interface, seed=seed, resume=True, settings=settings))
    check_folder(run)
    result = out / RESULT
    if result.exists():
        return read_object(result, "delete it to run the evaluation again")
    before = _exact_matches(checkpoint, device)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / PROBLEMS).exists():  # its modification time is the key of the token cache
        write_problems(out / PROBLEMS, TRAINING, seed=0)
    trained = train(run)
    row = {
        "interface": interface,
        "seed": seed,
        **_exact_matches(run.out / OUT, device),
        **{f"{name}_before": value for name, value in before.items()},
        "val_loss": trained["val_loss"],
        "trainable_parameters": trained["trainable_parameters"],
    }
    write_atomic(result, json.dumps(finite(row), indent=1).encode())
    return row


def _exact_matches(folder: Path, device: str) -> dict[str, float]:
    model = _load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {
        "in_domain": exact_match(model, tokenizer, problems(EVALUATED, 0, "in-domain"), device),
        "out_of_domain": exact_match(model, tokenizer, problems(EVALUATED, 0, "out-of-domain"), device),
    }


def _load(folder: Path) -> "PreTrainedModel":
    """Load a stock or converted checkpoint; transformers reads the latter once this package is imported."""
    return import_transformers().AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
    )


STEPS, RANK = 200, 8
LR, WIDTH = 0.012, 128  # of the updates, at that width
# GSM8K, trained on, and SVAMP, of GPT-256M after continued pretraining: exact match in per cent.
PRINTED = {"transpose": "16.9 / 12.4", "pit-frozen+init_transform=identity": "17.3 / 13.5"}


def adapted(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """Continue pretraining of one checkpoint with each tying, then apply LoRA with fixed tables."""
    arms = [
        Arm(label=TRANSPOSE, spec="transpose"),
        Arm(label="PIT, Z frozen, T = I (the paper's)", spec="pit-frozen+init_transform=identity"),
        Arm(label="PIT, Z trained, by rotation", spec="pit-trainable+init_transform=rotation"),
    ]
    trained = train_arms(out / "continued", arms, settings, seeds, started)
    body = []
    for arm in arms:
        interface: Interface = "transpose" if arm.spec == "transpose" else "pit-free"
        frozen: dict[str, Any] = {} if interface == "transpose" else {"table_lr": 0.0}
        rows = []
        for seed, run in trained.runs(arm).items():
            folder = run / OUT
            rows.append(
                adaptation(
                    folder,
                    out / "adapted" / run.name,
                    interface=interface,
                    steps=STEPS,
                    seed=seed,
                    lora_rank=RANK,
                    lr=LR * WIDTH / read_shape(folder).hidden_size,
                    device=settings.device,
                    **frozen,
                )
            )
        cells = [share([row[name] for row in rows]) for name in ("in_domain", "out_of_domain", "in_domain_before")]
        body.append([arm.label, *cells, PRINTED.get(arm.spec or "", "")])
    head = [
        "arm",
        "in domain (%)",
        "out of domain (%)",
        "in domain, before LoRA (%)",
        "paper: GSM8K / SVAMP (GPT-256M)",
    ]
    notes = [
        f"Exact match by greedy decoding on {EVALUATED} problems of each kind, after {STEPS} steps of LoRA with rank {RANK} on "
        f"{TRAINING:,} one-line word problems about sums and differences; out of domain is the same arithmetic in other words.",
        "The paper adapts to GSM8K and tests on SVAMP; it says neither its rank nor its rates, nor whether T is trained.",
        *trained.failures(),
    ]
    return [Table(title="PIT, Table 6: adaptation by LoRA", head=head, body=body, notes=notes)]
