"""Learning rates of each interface and body, and how they carry over from one size to another (docs/learning-rates.md)."""

import dataclasses
from typing import Any

from manifold_tying.models import preset
from manifold_tying.recipe import ENTRY_STEP, OFF_DIAGONAL_SCALE, SLOWS_AFTER, TRANSFORM_FACTOR
from manifold_tying.training._config import POET_SETTINGS, Interface, Settings, TrainConfig
from manifold_tying.training._continued_recipe import interface_maps, resolve_continued, schedule_lengths

# At the width below; an Adam step's effect on a hidden matrix grows with its width, so the rate shrinks with it.
BODY_LR: dict[Interface, float] = {
    "untied": 8e-3, "transpose": 8e-3, "pit-frozen": 4e-3, "pit-trainable": 4e-3, "pit-free": 4e-3
}  # fmt: skip
BODY_WIDTH = 128
TABLE_STD = 0.06
BETAS = (0.9, 0.99)
# POET's tables 9 and 10: 1e-3 at b = 256, at half the block twice as much; scheme full by the fraction in the same way.
EQUIVALENCE_LR, EQUIVALENCE_BLOCK, EQUIVALENCE_FRACTION = 1e-3, 256, 0.5
OF_A_MEMORY: tuple[Interface, ...] = ("pit-frozen", "pit-trainable")  # with Z and T apart
OF_A_TRANSFORM = ("transform_lr", "off_diagonal_scale", "diagonal")
OF_PIT = ("log_det_penalty", "diagonal_penalty", "init_transform", "bridge")
OF_A_TABLE = ("table_std", "table_lr", "table_slows_after")
OF_A_TRAINABLE_MEMORY = ("memory_lr", "memory_slows_after", "retraction", "retract_every", "second_moment")
MERGE_EVERY, MERGES = 400, 3  # POET's T_m, and into how many parts a short run is cut instead


def resolve(config: TrainConfig) -> TrainConfig:
    """The same run with every None replaced by its value."""
    settings = config.settings
    if settings.init_from is not None:
        return resolve_continued(config)
    shape = preset(settings.preset)
    pit, apart = config.interface.startswith("pit"), config.interface in OF_A_MEMORY
    lr = settings.lr if settings.lr is not None else BODY_LR[config.interface] * BODY_WIDTH / shape.hidden_size
    filled: dict[str, object] = {"lr": lr}
    if settings.embedding_norm is None:
        filled["embedding_norm"] = pit
    filled |= schedule_lengths(settings)
    if apart:
        filled |= interface_maps(settings)
    if not apart and settings.table_std is None:
        filled["table_std"] = TABLE_STD
    if apart and settings.transform_lr is None:
        filled["transform_lr"] = TRANSFORM_FACTOR * lr
    if apart and settings.off_diagonal_scale is None:
        filled["off_diagonal_scale"] = OFF_DIAGONAL_SCALE
    if settings.betas is None:
        filled["betas"] = BETAS
    if config.interface == "pit-trainable":
        if settings.memory_lr is None:
            filled["memory_lr"] = ENTRY_STEP / shape.vocab_size**0.5
        if settings.memory_slows_after is None:
            filled["memory_slows_after"] = SLOWS_AFTER
    if config.interface == "pit-free":
        std = TABLE_STD if settings.table_std is None else settings.table_std
        filled["table_lr"] = ENTRY_STEP * std if settings.table_lr is None else settings.table_lr
        filled["table_slows_after"] = SLOWS_AFTER if settings.table_slows_after is None else settings.table_slows_after
    if settings.poet:
        filled |= _poet(settings, shape.hidden_size)
    return dataclasses.replace(config, settings=dataclasses.replace(settings, **filled))  # type: ignore[arg-type]


def _poet(settings: Settings, hidden_size: int) -> dict[str, object]:
    """Block size, merges and rate of a POET body.

    Half the hidden size is the paper's largest share, 256 of 512: R and P then have half as many numbers as the weight, and
    as many as the weight itself at b = d. T_m = 400 is a thousandth of the paper's runs; in a run of a few hundred steps it
    would never merge, and scheme full would never reach the dimensions that it left out at first. A third of the steps
    still does, and merging more often costs loss (docs/learning-rates.md, and the paper's table 6).
    """
    filled: dict[str, object] = {}
    block_size = settings.block_size or max(2, min(EQUIVALENCE_BLOCK, hidden_size // 2))
    if settings.body == "poet-block":
        filled["block_size"] = block_size
    if settings.merge_every is None:
        filled["merge_every"] = min(MERGE_EVERY, -(-settings.steps // MERGES))
    if settings.equivalence_lr is None:
        full = settings.body == "poet-full"
        block_size = min(block_size, hidden_size)  # what fits
        filled["equivalence_lr"] = EQUIVALENCE_LR * (
            EQUIVALENCE_FRACTION / settings.fraction if full else EQUIVALENCE_BLOCK / block_size
        )
    return filled


def unused_settings(interface: Interface, settings: Settings) -> set[str]:
    """The settings that an interface and a body do not use."""
    return {
        *(OF_A_TABLE if interface in OF_A_MEMORY else OF_A_TRANSFORM),
        *(() if interface.startswith("pit") else OF_PIT),
        *(() if interface == "pit-trainable" else OF_A_TRAINABLE_MEMORY),
        *(() if settings.poet else POET_SETTINGS),
    }


def used_settings(config: TrainConfig) -> dict[str, Any]:
    """What identifies a resolved run, without the settings that its interface and its body do not use."""
    unused = unused_settings(config.interface, config.settings)
    return {name: value for name, value in config.as_json().items() if name not in unused}


def used_rates(interface: Interface, settings: Settings) -> dict[str, float | bool | None]:
    """The resolved settings that may differ between arms, for the report."""
    return {
        "lr": settings.lr,
        "memory_lr": settings.memory_lr if interface == "pit-trainable" else None,
        "table_lr": None if interface in OF_A_MEMORY else settings.table_lr,
        "transform_lr": settings.transform_lr if interface in OF_A_MEMORY else None,
        "equivalence_lr": settings.equivalence_lr if settings.poet else None,
        "table_std": None if interface in OF_A_MEMORY else settings.table_std,
        "embedding_norm": settings.embedding_norm,
    }
