"""Learning rates of continued pretraining, and what a run takes from the checkpoint (docs/continued-pretraining.md)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from manifold_tying.training._config import Interface, Settings, TrainConfig
from manifold_tying.training._hugging_face_shape import read_shape

# At this width, where they were tried; all shrink with the width, as the body's rate from scratch does.
WIDTH = 128
LR, LORA_LR = 2e-3, 4e-3
BETAS = (0.9, 0.95)
MEMORY_STEP = 0.045  # share of an entry of Z, 1/√V, that one step may change at the peak
TRANSFORM_FACTOR = 1.0  # of the body's rate
# After init_transform=rotation, whose rates are by entry (rotation_scales): of the body's rate.
ROTATED_MEMORY_FACTOR, ROTATED_TRANSFORM_FACTOR = 1.0, 4.0


def resolve_continued(config: TrainConfig) -> TrainConfig:
    """A run with ``init_from``, every None replaced by its value; ValueError where the checkpoint does not allow it."""
    settings = config.settings
    assert settings.init_from is not None
    shape = read_shape(settings.init_from)
    if settings.sequence_length > (shape.max_positions or settings.sequence_length):
        raise ValueError(
            f"expected sequence_length <= {shape.max_positions}, the positions that {settings.init_from} was made for, "
            f"got {settings.sequence_length}"
        )
    if shape.interface is not None:
        _check_converted(settings, config.interface, shape.interface)
    pit = config.interface.startswith("pit")
    narrowing = WIDTH / shape.hidden_size
    lr = settings.lr if settings.lr is not None else narrowing * (LR if settings.lora_rank is None else LORA_LR)
    apart = pit and config.interface != "pit-free"
    filled: dict[str, object] = {"lr": lr, **schedule_lengths(settings)}
    if apart:
        filled |= interface_maps(settings, shape.interface)
    if settings.betas is None:
        filled["betas"] = BETAS
    rotated = settings.init_transform == "rotation" or bool(shape.interface and shape.interface.get("rotated"))
    if apart and settings.transform_lr is None:
        filled["transform_lr"] = (ROTATED_TRANSFORM_FACTOR if rotated else TRANSFORM_FACTOR) * lr
    if config.interface == "pit-trainable" and settings.memory_lr is None:
        filled["memory_lr"] = ROTATED_MEMORY_FACTOR * lr if rotated else narrowing * MEMORY_STEP / shape.vocab_size**0.5
    if settings.tokenizer is None and not settings.data.startswith("tokens:"):
        tokenizer = settings.init_from / "tokenizer.json"
        if not tokenizer.is_file():
            raise ValueError(
                f"expected a tokenizer beside the weights, but there is no {tokenizer}; give the tokenizer.json of the model "
                "(tokenizer), or tokens that it made (data tokens:DIR)"
            )
        filled["tokenizer"] = tokenizer
    return dataclasses.replace(config, settings=dataclasses.replace(settings, **filled))  # type: ignore[arg-type]


def interface_maps(settings: Settings, recorded: Mapping[str, Any] | None = None) -> dict[str, object]:
    """Retraction and diagonal, where they are not given: a converted checkpoint's own, else polar and exp."""
    usual = {"retraction": "polar", "diagonal": "exp"}
    return {name: getattr(settings, name) or (recorded or usual)[name] for name in usual}


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
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    if given := [name for name in ("init_transform", "bridge") if getattr(settings, name) != defaults[name]]:
        raise ValueError(
            f"{', '.join(given)} cannot be chosen, since {folder} is converted already: Z and T go on as they are. Leave it "
            "out, or go on from the checkpoint that it was converted from"
        )
    if settings.diagonal not in (None, recorded.get("diagonal")):
        raise ValueError(
            f"expected diagonal={recorded.get('diagonal')}, the map that the transform in {folder} is stored by, got "
            f"{settings.diagonal}; leave it out"
        )


def schedule_lengths(settings: Settings) -> dict[str, object]:
    """Warm-up and steps between evaluations, where they are not given."""
    filled: dict[str, object] = {}
    if settings.warmup_steps is None:
        filled["warmup_steps"] = min(1000, -(-settings.steps // 10))
    if settings.eval_every is None:
        filled["eval_every"] = -(-settings.steps // 5)
    return filled
