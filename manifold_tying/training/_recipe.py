"""Learning rates of each interface, and how they carry over from one size to another (docs/learning-rates.md)."""

import dataclasses

from manifold_tying.models import preset
from manifold_tying.training._config import Interface, Settings, TrainConfig

# Adam moves every entry of the memory by about its learning rate, and the entries are about 1/√V: this is the share of an
# entry that one step may change at the peak.
MEMORY_STEP = 0.3
TRANSFORM_FACTOR = 5.0
# At the width below; an Adam step's effect on a hidden matrix grows with its width, so the rate shrinks with it.
BODY_LR: dict[Interface, float] = {"untied": 8e-3, "transpose": 8e-3, "pit-frozen": 4e-3, "pit-trainable": 4e-3}
BODY_WIDTH = 128
TABLE_STD = 0.06


def resolve(config: TrainConfig) -> TrainConfig:
    """The same run with every None replaced by its value."""
    settings = config.settings
    shape = preset(settings.preset)
    pit = config.interface.startswith("pit")
    lr = settings.lr if settings.lr is not None else BODY_LR[config.interface] * BODY_WIDTH / shape.hidden_size
    filled: dict[str, object] = {"lr": lr}
    if settings.embedding_norm is None:
        filled["embedding_norm"] = pit
    if settings.warmup_steps is None:
        filled["warmup_steps"] = min(1000, -(-settings.steps // 10))
    if settings.eval_every is None:
        filled["eval_every"] = -(-settings.steps // 5)
    if not pit and settings.table_std is None:
        filled["table_std"] = TABLE_STD
    if pit and settings.transform_lr is None:
        filled["transform_lr"] = TRANSFORM_FACTOR * lr
    if config.interface == "pit-trainable" and settings.memory_lr is None:
        filled["memory_lr"] = MEMORY_STEP / shape.vocab_size**0.5
    return dataclasses.replace(config, settings=dataclasses.replace(settings, **filled))  # type: ignore[arg-type]


def used_rates(interface: Interface, settings: Settings) -> dict[str, float | bool | None]:
    """The resolved settings that may differ between arms, for the report."""
    return {
        "lr": settings.lr,
        "memory_lr": settings.memory_lr if interface == "pit-trainable" else None,
        "transform_lr": settings.transform_lr if interface.startswith("pit") else None,
        "table_std": None if interface.startswith("pit") else settings.table_std,
        "embedding_norm": settings.embedding_norm,
    }
