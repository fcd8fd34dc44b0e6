"""Run a model on a few random tokens to validate a conversion."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH = 8


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; restores every module's mode and torch's global generators on exit."""
    modes = {module: module.training for module in model.modules()}
    gpus = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    with torch.no_grad(), torch.random.fork_rng(gpus):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def random_ids(model: "PreTrainedModel", seed: int = 0) -> Tensor:
    """(1, LENGTH) random token ids without padding, on the embedding's device, from a separate generator."""
    embedding: Any = model.get_input_embeddings()
    V, padding = len(embedding.weight), getattr(embedding, "padding_idx", None)
    ids = torch.randint(V, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    if padding is not None:
        ids[ids == padding] = (padding + 1) % V
    return ids.to(embedding.weight.device)


def failure(model: "PreTrainedModel") -> Exception | None:
    """The exception on random tokens, or None if they or ``dummy_inputs`` run (speech models have no ``input_ids``)."""
    error = None
    for make in (lambda: {"input_ids": random_ids(model)}, lambda: _example(model)):
        try:
            model(**make())
            return None
        except Exception as raised:
            error = error or raised
    return error


def _example(model: "PreTrainedModel") -> dict[str, Any]:
    inputs = {name: value.to(model.device) for name, value in model.dummy_inputs.items()}
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def independent_of_tokens(model: "PreTrainedModel", modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules with equal inputs for different tokens, such as position tables; empty if the model does not run."""
    inputs: dict[nn.Module, list[list[Tensor]]] = {module: [] for module in modules}

    def keep(module: nn.Module, given: tuple[Any, ...]) -> None:
        inputs[module][-1].extend(x for x in given if isinstance(x, Tensor))

    hooks = [module.register_forward_pre_hook(keep) for module in modules]
    try:
        with undisturbed(model):
            for seed in (0, 1):
                for calls in inputs.values():
                    calls.append([])
                model(input_ids=random_ids(model, seed))
    except Exception:
        return []
    finally:
        for hook in hooks:
            hook.remove()
    return [
        module
        for module, (first, second) in inputs.items()
        if first and len(first) == len(second) and all(map(torch.equal, first, second))
    ]
