"""Model, optimizer and schedule of a run."""

import math

import torch
from torch import Tensor

from manifold_tying.models import Llama
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.training._config import Interface, Settings, TrainConfig
from manifold_tying.tying import PIT, Memory, TokenInterface, TransposeTying, Untied

MEMORY = "interface.parametrizations.memory.original"
FINAL_RATE = 0.1  # of the peak, at the end of the cosine


def build_interface(name: Interface, vocab_size: int, hidden_size: int, settings: Settings) -> TokenInterface:
    """The token interface of that name."""
    if name == "untied" or name == "transpose":
        assert settings.table_std is not None, "the settings are resolved"
        return (Untied if name == "untied" else TransposeTying)(vocab_size, hidden_size, std=settings.table_std)
    memory: Memory = "frozen" if name == "pit-frozen" else "trainable"
    return PIT(vocab_size, hidden_size, memory=memory, retraction=settings.retraction, diagonal=settings.diagonal)


def build_model(config: TrainConfig) -> Llama:
    """The model, freshly initialized from the run's seed, on its device."""
    shape = config.settings.model
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        interface = build_interface(config.interface, shape.vocab_size, shape.hidden_size, config.settings)
        model = Llama(shape, interface)
    return model.to(config.settings.device)


def build_optimizer(model: Llama, settings: Settings) -> RiemannianAdam:
    """One optimizer for all: AdamW for the body, Riemannian Adam for a trainable memory, T at its own rate."""
    transform = {"interface.parametrizations.cholesky_factor.*": {"lr": settings.transform_lr}}
    groups = param_groups(
        model,
        manifold_lr=settings.memory_lr,
        weight_decay=settings.weight_decay,
        overrides=transform if isinstance(model.interface, PIT) else None,
    )
    assert settings.lr is not None, "the settings are resolved"
    return RiemannianAdam(
        groups,
        settings.lr,
        settings.betas,
        second_moment=settings.second_moment,
        retract_every=settings.retract_every,
        fused=True if torch.device(settings.device).type == "cuda" else None,
    )


def rate_factor(step: int, settings: Settings) -> float:
    """Learning rate over its peak at step 0, 1, ...: linear warm-up, then a cosine to ``FINAL_RATE`` at the last step."""
    warmup = settings.warmup_steps or 0
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - 1 - warmup)
    return FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2


def clipped_parameters(model: Llama) -> list[Tensor]:
    """Everything whose gradient norm is clipped: all but the memory, whose steps Adam and the retraction bound already."""
    return [p for name, p in model.named_parameters() if p.requires_grad and name != MEMORY]
