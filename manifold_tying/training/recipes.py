"""Learning rates of each interface and body, and how they scale with model size (docs/learning-rates.md)."""

import dataclasses
from typing import Any

from manifold_tying.huggingface.checkpoint import recorded_mark
from manifold_tying.optim import MERGE_EVERY
from manifold_tying.recipe import ENTRY_STEP, OFF_DIAGONAL_SCALE, SLOWS_AFTER, TRANSFORM_FACTOR
from manifold_tying.training.config import MEMORY_INTERFACES, Settings, TrainConfig, read_shape
from manifold_tying.training.sections import Interface
from manifold_tying.tying import tied_std

# Width at which the rates were tuned. An Adam step's effect on a hidden matrix grows with the width, so lr is ∝ 1 / width.
WIDTH = 128
BODY_LR: dict[Interface, float] = {
    "untied": 8e-3, "transpose": 8e-3, "pit-frozen": 4e-3, "pit-trainable": 4e-3, "pit-free": 4e-3
}  # fmt: skip
UNTIED_STD = 0.06
BETAS = (0.9, 0.99)
# Of the rate of plain matrices, for what the body trains in their place (docs/bodies.md).
BODY_FACTORS = {"muon": 1.0, "hyperball": 20.0, "stiefel": 1.0, "stiefel-muon": 5.0, "isospectral": 1.0}
MAPS = {"retraction": "polar", "diagonal": "exp"}
# POET's tables 9 and 10: 1e-3 at b = 256, inversely proportional to b; in scheme full, to the fraction.
EQUIVALENCE_LR, EQUIVALENCE_BLOCK, EQUIVALENCE_FRACTION = 1e-3, 256, 0.5
MERGES = 3  # in a run of fewer than 3 T_m steps
# Continued pretraining (docs/continued-pretraining.md).
CONTINUED_LR, LORA_LR = 2e-3, 4e-3
CONTINUED_BETAS = (0.9, 0.95)
CONTINUED_MEMORY_STEP = 0.045  # at the peak, one step changes an entry of Z by this share of its size 1/√V
# After init_transform=rotation: multiples of the body's rate, before the per-entry factors of rotation_scales.
ROTATED_MEMORY_FACTOR, ROTATED_TRANSFORM_FACTOR = 1.0, 4.0


def resolve(config: TrainConfig) -> TrainConfig:
    """Replace every None by the recipe's value; raises ValueError if the checkpoint does not allow the settings."""
    settings = config.settings
    defaults = _from_scratch(config) if settings.init_from is None else _continued(config)
    defaults |= {"warmup_steps": min(1000, -(-settings.steps // 10)), "eval_every": -(-settings.steps // 5)}
    filled = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    return dataclasses.replace(config, settings=dataclasses.replace(settings, **filled))


def _from_scratch(config: TrainConfig) -> dict[str, Any]:
    settings, interface = config.settings, config.interface
    shape = settings.model
    lr = BODY_LR[interface] * WIDTH / shape.hidden_size if settings.lr is None else settings.lr
    defaults: dict[str, Any] = {"lr": lr, "betas": BETAS, "embedding_norm": interface.startswith("pit")}
    if interface in MEMORY_INTERFACES:
        defaults |= {**MAPS, "transform_lr": TRANSFORM_FACTOR * lr, "off_diagonal_scale": OFF_DIAGONAL_SCALE}
    else:
        defaults["table_std"] = UNTIED_STD if interface == "untied" else tied_std(shape.hidden_size)
    if interface == "pit-trainable":
        defaults |= {"memory_lr": ENTRY_STEP / shape.vocab_size**0.5, "memory_slows_after": SLOWS_AFTER}
    if interface == "pit-free":
        std = defaults["table_std"] if settings.table_std is None else settings.table_std
        defaults |= {"table_lr": ENTRY_STEP * std, "table_slows_after": SLOWS_AFTER}
    if settings.poet:
        return defaults | _poet(settings, shape.hidden_size)
    return defaults | ({"body_lr": lr * BODY_FACTORS[settings.body]} if settings.body != "adamw" else {})


def _poet(settings: Settings, hidden_size: int) -> dict[str, Any]:
    """Block size, merge interval and learning rate of a POET body.

    Half the hidden size is the paper's largest ratio, 256 of 512: R and P then have half as many parameters as the weight.
    At b = d they have as many as the weight. T_m = 400 is a thousandth of the paper's runs. A run of a few hundred steps
    would never merge, and scheme full would never train the dimensions that it left out at first. Merging after each third
    of the steps avoids this; merging more often costs loss (docs/learning-rates.md, and the paper's table 6).
    """
    defaults: dict[str, Any] = {"merge_every": min(MERGE_EVERY, -(-settings.steps // MERGES))}
    if settings.body == "poet-full":
        return defaults | {"body_lr": EQUIVALENCE_LR * EQUIVALENCE_FRACTION / settings.fraction}
    block_size = settings.block_size or max(2, min(EQUIVALENCE_BLOCK, hidden_size // 2))
    rate = EQUIVALENCE_LR * EQUIVALENCE_BLOCK / min(block_size, hidden_size)  # blocks are at most as wide as the model
    return defaults | {"block_size": block_size, "body_lr": rate}


def _continued(config: TrainConfig) -> dict[str, Any]:
    settings, interface = config.settings, config.interface
    assert settings.init_from is not None
    shape, mark = read_shape(settings.init_from), recorded_mark(settings.init_from)
    length, most = settings.sequence_length, getattr(shape, "max_position_embeddings", None)
    if most is not None and length > most:
        raise ValueError(f"expected sequence_length <= {most}, the maximum of {settings.init_from}, got {length}")
    if mark is not None:
        _check_converted(settings, interface)
    narrowing = WIDTH / shape.hidden_size
    lr = narrowing * (CONTINUED_LR if settings.lora_rank is None else LORA_LR) if settings.lr is None else settings.lr
    rotated = settings.init_transform == "rotation" or bool(mark and mark["rotated"])
    defaults: dict[str, Any] = {"lr": lr, "betas": CONTINUED_BETAS}
    if interface in MEMORY_INTERFACES:
        defaults |= MAPS
        defaults["transform_lr"] = (ROTATED_TRANSFORM_FACTOR if rotated else 1.0) * lr
    if interface == "pit-trainable":
        step = narrowing * CONTINUED_MEMORY_STEP / shape.vocab_size**0.5
        defaults["memory_lr"] = ROTATED_MEMORY_FACTOR * lr if rotated else step
    if settings.tokenizer is None and not settings.data.startswith("tokens:"):
        tokenizer = settings.init_from / "tokenizer.json"
        if not tokenizer.is_file():
            raise ValueError(
                f"expected a tokenizer beside the weights, but {tokenizer} does not exist; set tokenizer to the model's "
                "tokenizer.json, or data to tokens:DIR with tokens that it made"
            )
        defaults["tokenizer"] = tokenizer
    return defaults


def _check_converted(settings: Settings, interface: Interface) -> None:
    """Raises ValueError for settings that need a stock checkpoint."""
    folder = settings.init_from
    if not interface.startswith("pit"):
        raise ValueError(
            f"{folder} is already converted: its embedding divides, and {interface} starts from a table that is looked up. "
            "Choose a PIT interface, or start from the checkpoint that it was converted from"
        )
    if given := settings.changed(("init_transform",)):
        raise ValueError(
            f"{given} cannot be set, since {folder} is already converted: training continues with its W. Leave it out, or "
            "start from the checkpoint that it was converted from"
        )
