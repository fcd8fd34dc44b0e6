"""Learning rates of each interface and body, and how they carry over from one size to another (docs/learning-rates.md)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from manifold_tying.models import preset
from manifold_tying.recipe import ENTRY_STEP, OFF_DIAGONAL_SCALE, SLOWS_AFTER, TRANSFORM_FACTOR
from manifold_tying.training.config import OF_A_MEMORY, Settings, TrainConfig, read_shape
from manifold_tying.training.sections import Interface

# At this width; an Adam step's effect on a hidden matrix grows with its width, so the rate shrinks with it.
WIDTH = 128
BODY_LR: dict[Interface, float] = {
    "untied": 8e-3, "transpose": 8e-3, "pit-frozen": 4e-3, "pit-trainable": 4e-3, "pit-free": 4e-3
}  # fmt: skip
TABLE_STD = 0.06
BETAS = (0.9, 0.99)
MAPS = {"retraction": "polar", "diagonal": "exp"}
# POET's tables 9 and 10: 1e-3 at b = 256, at half the block twice as much; scheme full by the fraction in the same way.
EQUIVALENCE_LR, EQUIVALENCE_BLOCK, EQUIVALENCE_FRACTION = 1e-3, 256, 0.5
MERGE_EVERY, MERGES = 400, 3  # POET's T_m, and into how many parts a short run is cut instead
# Of continued pretraining (docs/continued-pretraining.md).
CONTINUED_LR, LORA_LR = 2e-3, 4e-3
CONTINUED_BETAS = (0.9, 0.95)
CONTINUED_MEMORY_STEP = 0.045  # share of an entry of Z, 1/√V, that one step may change at the peak
# After init_transform=rotation, whose rates are by entry (rotation_scales): of the body's rate.
ROTATED_MEMORY_FACTOR, ROTATED_TRANSFORM_FACTOR = 1.0, 4.0


def resolve(config: TrainConfig) -> TrainConfig:
    """The same run with every None replaced by its value; ValueError where a checkpoint does not allow the settings."""
    settings = config.settings
    usual = _from_scratch(config) if settings.init_from is None else _continued(config)
    usual |= {"warmup_steps": min(1000, -(-settings.steps // 10)), "eval_every": -(-settings.steps // 5)}
    filled = {name: value for name, value in usual.items() if getattr(settings, name) is None}
    return dataclasses.replace(config, settings=dataclasses.replace(settings, **filled))


def _from_scratch(config: TrainConfig) -> dict[str, Any]:
    settings, interface = config.settings, config.interface
    shape = preset(settings.preset)
    lr = BODY_LR[interface] * WIDTH / shape.hidden_size if settings.lr is None else settings.lr
    usual: dict[str, Any] = {"lr": lr, "betas": BETAS, "embedding_norm": interface.startswith("pit")}
    if interface in OF_A_MEMORY:
        usual |= {**MAPS, "transform_lr": TRANSFORM_FACTOR * lr, "off_diagonal_scale": OFF_DIAGONAL_SCALE}
    else:
        usual["table_std"] = TABLE_STD
    if interface == "pit-trainable":
        usual |= {"memory_lr": ENTRY_STEP / shape.vocab_size**0.5, "memory_slows_after": SLOWS_AFTER}
    if interface == "pit-free":
        std = TABLE_STD if settings.table_std is None else settings.table_std
        usual |= {"table_lr": ENTRY_STEP * std, "table_slows_after": SLOWS_AFTER}
    return usual | (_poet(settings, shape.hidden_size) if settings.poet else {})


def _poet(settings: Settings, hidden_size: int) -> dict[str, Any]:
    """Block size, merges and rate of a POET body.

    Half the hidden size is the paper's largest share, 256 of 512: R and P then have half as many numbers as the weight, and
    as many as the weight itself at b = d. T_m = 400 is a thousandth of the paper's runs; in a run of a few hundred steps it
    would never merge, and scheme full would never reach the dimensions that it left out at first. A third of the steps
    still does, and merging more often costs loss (docs/learning-rates.md, and the paper's table 6).
    """
    usual: dict[str, Any] = {"merge_every": min(MERGE_EVERY, -(-settings.steps // MERGES))}
    if settings.body == "poet-full":
        return usual | {"equivalence_lr": EQUIVALENCE_LR * EQUIVALENCE_FRACTION / settings.fraction}
    block_size = settings.block_size or max(2, min(EQUIVALENCE_BLOCK, hidden_size // 2))
    rate = EQUIVALENCE_LR * EQUIVALENCE_BLOCK / min(block_size, hidden_size)  # what fits
    return usual | {"block_size": block_size, "equivalence_lr": rate}


def _continued(config: TrainConfig) -> dict[str, Any]:
    settings, interface = config.settings, config.interface
    assert settings.init_from is not None
    shape = read_shape(settings.init_from)
    if settings.sequence_length > (shape.max_positions or settings.sequence_length):
        raise ValueError(
            f"expected sequence_length <= {shape.max_positions}, the positions that {settings.init_from} was made for, "
            f"got {settings.sequence_length}"
        )
    recorded = shape.interface
    if recorded is not None:
        _check_converted(settings, interface, recorded)
    narrowing = WIDTH / shape.hidden_size
    lr = narrowing * (CONTINUED_LR if settings.lora_rank is None else LORA_LR) if settings.lr is None else settings.lr
    rotated = settings.init_transform == "rotation" or bool(recorded and recorded.get("rotated"))
    usual: dict[str, Any] = {"lr": lr, "betas": CONTINUED_BETAS}
    if interface in OF_A_MEMORY:
        usual |= {name: (recorded or MAPS)[name] for name in MAPS}
        usual["transform_lr"] = (ROTATED_TRANSFORM_FACTOR if rotated else 1.0) * lr
    if interface == "pit-trainable":
        step = narrowing * CONTINUED_MEMORY_STEP / shape.vocab_size**0.5
        usual["memory_lr"] = ROTATED_MEMORY_FACTOR * lr if rotated else step
    if settings.tokenizer is None and not settings.data.startswith("tokens:"):
        tokenizer = settings.init_from / "tokenizer.json"
        if not tokenizer.is_file():
            raise ValueError(
                f"expected a tokenizer beside the weights, but there is no {tokenizer}; give the tokenizer.json of the model "
                "(tokenizer), or tokens that it made (data tokens:DIR)"
            )
        usual["tokenizer"] = tokenizer
    return usual


def _check_converted(settings: Settings, interface: Interface, recorded: Mapping[str, Any]) -> None:
    """ValueError for what only a stock checkpoint can start, or what contradicts the numbers that are stored."""
    folder = settings.init_from
    if not interface.startswith("pit"):
        raise ValueError(
            f"{folder} is converted already: it has Z and T in the place of tables, and {interface} starts from a table. "
            "Choose a PIT interface, or go on from the checkpoint that it was converted from"
        )
    if (recorded["memory"] == "free") != (interface == "pit-free"):
        held = "one free table" if recorded["memory"] == "free" else "Z and T apart"
        raise ValueError(
            f"{folder} holds {held}, which {interface} does not train. Choose another PIT interface, or go on from the "
            "checkpoint that it was converted from"
        )
    if given := settings.changed(("init_transform", "bridge")):
        raise ValueError(
            f"{given} cannot be chosen, since {folder} is converted already: Z and T go on as they are. Leave it "
            "out, or go on from the checkpoint that it was converted from"
        )
    if settings.diagonal not in (None, recorded.get("diagonal")):
        raise ValueError(
            f"expected diagonal={recorded.get('diagonal')}, the map that the transform in {folder} is stored by, got "
            f"{settings.diagonal}; leave it out"
        )
