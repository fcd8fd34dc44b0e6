"""Build a run's model, optimizer and schedules; load the model of a finished run."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying.models import Llama
from manifold_tying.optim import MergeSchedule, RiemannianAdam, RiemannianMuon, param_groups
from manifold_tying.parametrizations import isospectral, sphere, stiefel
from manifold_tying.poet import equivalence_
from manifold_tying.recipe import off_diagonal_scale
from manifold_tying.training.checkpoint import STATE, checkpoints, load_checkpoint, read_state
from manifold_tying.training.config import CORPUS, HASHES, MEMORY_INTERFACES, Settings, TrainConfig
from manifold_tying.training.files import digest
from manifold_tying.training.hf_model import MEMORIES, HuggingFaceModel, Model, build_hugging_face_model
from manifold_tying.training.sections import Interface
from manifold_tying.tying import PIT, ManifoldPIT, TokenInterface, TransposeTying, Untied

BLOCKS = "blocks.*"  # a body constrains every linear layer but the token interface
CONSTRAINTS: dict[str, Callable[[nn.Linear], nn.Linear]] = {
    "hyperball": partial(sphere, of="matrix"), "isospectral": isospectral, "stiefel": stiefel, "stiefel-muon": stiefel
}  # fmt: skip
BY_MUON = ("muon", "hyperball", "stiefel-muon")
# Parameter names, in the reference model and in transformers models, whose embedding holds the interface.
MEMORY = "interface.parametrizations.memory.original"
FACTOR = "*interface.parametrizations.cholesky_factor.*"


def build_interface(name: Interface, vocab_size: int, hidden_size: int, settings: Settings) -> TokenInterface:
    if name in MEMORY_INTERFACES:
        assert settings.retraction is not None and settings.diagonal is not None, "the settings are resolved"
        return PIT(
            vocab_size, hidden_size, memory=MEMORIES[name], retraction=settings.retraction, diagonal=settings.diagonal
        )
    assert settings.table_std is not None, "the settings are resolved"
    if name == "pit-free":
        return PIT(vocab_size, hidden_size, memory="free", std=settings.table_std)
    options: dict[str, Any] = {"std": settings.table_std, "logit_scale": bool(settings.logit_scale)}
    if name == "untied":
        return Untied(vocab_size, hidden_size, **options)
    if settings.input_gradient_scale is not None:
        options["input_gradient_scale"] = settings.input_gradient_scale
    return TransposeTying(vocab_size, hidden_size, **options)


def build_model(config: TrainConfig) -> Model:
    """The model on its device, initialized from the run's seed or from a checkpoint."""
    if config.settings.init_from is not None:
        return build_hugging_face_model(config.interface, config.settings, config.seed)
    shape = config.settings.model
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model = Llama(shape, build_interface(config.interface, shape.vocab_size, shape.hidden_size, config.settings))
    if config.settings.poet:
        s = config.settings
        scheme: dict[str, Any] = {"scheme": "block", "block_size": s.block_size}
        if s.body == "poet-full":
            scheme = {"scheme": "full", "fraction": s.fraction}
        options: dict[str, Any] = {"terms": s.cayley_terms, "init": s.init, "out_share": s.out_share}
        equivalence_(model, BLOCKS, seed=config.seed, verbose=False, **scheme, **options)
    if constraint := CONSTRAINTS.get(config.settings.body):
        for layer in [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]:
            constraint(layer)
    return model.to(config.settings.device)


def build_optimizer(model: Model, settings: Settings) -> RiemannianAdam:
    """One optimizer with a rate for each part, Muon for what the body and the memory ask for, Adam for the rest.

    Skew vectors have no weight decay: it would pull R and P to the identity, but only between merges. POET's paper reports
    0.01 without naming the parameters.
    """
    rates = model.rotation_scales() if isinstance(model, HuggingFaceModel) else {}
    if isinstance(model.interface, ManifoldPIT):
        factor = next((name for name in rates if fnmatchcase(name, FACTOR)), FACTOR)
        rates[factor] = transform_rates(model.interface.hidden_size, settings, rates.get(factor, {}))
        memory = next((name for name in rates if name.endswith(MEMORY)), f"*{MEMORY}")
        rates[memory] = {
            **rates.get(memory, {}),
            "slows_after": settings.memory_slows_after or None,
            "use_muon": settings.memory_rule == "muon",
            "second_moment": settings.second_moment,
            "project_every": settings.project_every,
        }
    else:
        given = {"lr": settings.table_lr, "slows_after": settings.table_slows_after or None}
        own = {name: value for name, value in given.items() if value is not None}
        tables = {table for table in model.interface.parameters() if table.ndim == 2}  # not a logit scale
        for name in (name for name, parameter in model.named_parameters() if own and parameter in tables):
            rates[name] = {**rates.get(name, {}), **own}
    if settings.body != "adamw":
        weights = f"{BLOCKS}.*.*.weight" if settings.body == "muon" else f"{BLOCKS}.parametrizations.weight.original*"
        rates[weights] = {"lr": settings.body_lr, "use_muon": settings.body in BY_MUON}
    groups = param_groups(model, manifold_lr=settings.memory_lr, weight_decay=settings.weight_decay, overrides=rates)
    assert settings.lr is not None and settings.betas is not None, "the settings are resolved"
    options: dict[str, Any] = {
        "fused": True if torch.device(settings.device).type == "cuda" else None,
        "nonfinite": "ignore",  # the loop checks the norms before a step
    }
    if settings.body in BY_MUON or settings.memory_rule == "muon":
        groups = [{"use_muon": False, **group} for group in groups]
        return RiemannianMuon(groups, settings.lr, betas=settings.betas, **options)
    return RiemannianAdam(groups, settings.lr, settings.betas, **options)


def transform_rates(hidden_size: int, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of ``param_groups`` for L: its learning rate, and a lower one for its off-diagonal entries."""
    rates = {**given, "lr": settings.transform_lr}
    if settings.off_diagonal_scale is not None:
        rates["scale"] = off_diagonal_scale(hidden_size, settings.off_diagonal_scale) * given.get("scale", 1.0)
    return rates


def build_merges(model: Model, optimizer: RiemannianAdam, settings: Settings) -> MergeSchedule | None:
    """POET's merge schedule; None for another body."""
    if not settings.poet:
        return None
    assert settings.merge_every is not None, "the settings are resolved"
    return MergeSchedule(model, optimizer, settings.merge_every)


def clipped_parameters(model: Model) -> list[Tensor]:
    """All parameters except the memory, whose steps Adam and the retraction already bound."""
    return [p for name, p in model.named_parameters() if p.requires_grad and not name.endswith(MEMORY)]


def load_model(path: str | Path, *, device: str = "cpu") -> nn.Module:
    """Load the model of a run of ``train`` or ``ablate``, or of one of its checkpoints.

    With :func:`checkpoints`, a diagnostic over training is a loop::

        for path in checkpoints("runs/ablation/transpose-0"):
            print(path.name, spectral_summary(load_model(path).blocks[0].mlp.up.weight))

    Args:
        path: a run's folder, to load its newest checkpoint, or a checkpoint's folder; sharded or not.
        device: the model's device; may differ from the training device.

    Returns:
        The reference model, or the transformers model of a run with ``init_from``, whose folder must still exist.

    Raises:
        ValueError: there is no checkpoint, or it is damaged.
    """
    _, model, _ = load_run(Path(path), device)
    return model.model if isinstance(model, HuggingFaceModel) else model


def load_run(folder: Path, device: str = "cpu") -> tuple[Path, Model, Settings]:
    """The checkpoint's folder, the model as it trained, and the settings; the arguments are those of :func:`load_model`."""
    if not (folder / STATE).exists():
        saved = checkpoints(folder)
        if not saved:
            raise ValueError(f"expected the folder of a run with checkpoints, or of a checkpoint, got {folder}")
        folder = saved[-1]
    config = read_state(folder)["config"]
    values: dict[str, Any] = {k: v for k, v in config.items() if k not in ("interface", "seed", CORPUS)}
    values |= {name: Path(values[name]) for name in ("init_from", "tokenizer") if values.get(name)}
    settings = Settings(**(values | {"betas": tuple(values["betas"]), "device": device}))
    model = build_model(TrainConfig(out=folder, interface=config["interface"], seed=config["seed"], settings=settings))
    if (start := settings.init_from) and digest(start / "config.json") != config[CORPUS][HASHES[0]]:
        raise ValueError(f"{start / 'config.json'} is not the one that the run {folder} started from; restore it")
    load_checkpoint(folder, model, None, config)
    return folder, model, settings
