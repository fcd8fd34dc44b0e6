"""Loading the model of a run."""

from pathlib import Path
from typing import Any

from torch import nn

from manifold_tying.training._build import build_model
from manifold_tying.training._checkpoint import STATE, checkpoints, load_checkpoint, read_state
from manifold_tying.training._hugging_face_model import HuggingFaceModel
from manifold_tying.training._identity import CORPUS
from manifold_tying.training.config import Settings, TrainConfig

PATHS = ("init_from", "tokenizer")


def load_model(path: str | Path, *, device: str = "cpu") -> nn.Module:
    """Load the model of a run of ``train`` or ``ablate``, or of one of its checkpoints.

    With :func:`checkpoints`, a diagnostic over training is a loop::

        for path in checkpoints("runs/ablation/transpose-0"):
            print(path.name, spectral_summary(load_model(path).blocks[0].mlp.up.weight))

    Args:
        path: a run's folder, for its newest checkpoint, or a checkpoint's; sharded or not.
        device: the model's device; need not be the one it was trained on.

    Returns:
        The reference model, or the transformers model of a run with ``init_from``, whose folder must still exist.

    Raises:
        ValueError: there is no checkpoint, or it is damaged.
    """
    folder = Path(path)
    if not (folder / STATE).exists():
        saved = checkpoints(folder)
        if not saved:
            raise ValueError(f"expected the folder of a run with checkpoints or of one of them, got {folder}")
        folder = saved[-1]
    config = read_state(folder)["config"]
    values: dict[str, Any] = {k: v for k, v in config.items() if k not in ("interface", "seed", CORPUS)}
    values |= {name: Path(values[name]) for name in PATHS if values.get(name)}
    settings = Settings(**(values | {"betas": tuple(values["betas"]), "device": device}))
    model = build_model(TrainConfig(out=folder, interface=config["interface"], seed=config["seed"], settings=settings))
    load_checkpoint(folder, model, None, config)
    return model.model if isinstance(model, HuggingFaceModel) else model
