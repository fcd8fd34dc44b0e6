"""The residual stream of a language model at one position, and the model's own readout of it."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manifold_tying.diagnostics._tables import embedding_and_head
from manifold_tying.tying import TokenInterface


class Stream(NamedTuple):
    """f_0 (what enters the first block), f_1, ..., f_m (what leaves each) of one position, and how the head reads them."""

    states: Tensor  # (m + 1, d), before the final norm
    read: Callable[[Tensor], Tensor]  # a state (..., d) to the normed state that the head multiplies, (..., d)
    score: Callable[[Tensor], Tensor]  # that to logits, (..., V)


@torch.no_grad()
def residual_stream(model: nn.Module, ids: Tensor, position: int = -1) -> Stream:
    """The states of one position of token ids (N,), by hooks: the model is not changed.

    The reference model, or a Hugging Face causal language model whose final norm is the module that made its last hidden
    state. ValueError where the readout of the last state is not the model's own prediction.
    """
    if ids.ndim != 1 or not 0 < len(ids) or not -len(ids) <= position < len(ids):
        raise ValueError(f"expected token ids (N,) and a position among them, got {tuple(ids.shape)} and {position}")
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        ours = isinstance(getattr(model, "interface", None), TokenInterface)
        stream, logits = (_reference if ours else _hugging_face)(model, ids[None], position)
    finally:
        for module in training:
            module.training = True
    expected = logits[0, position].float()
    found = stream.score(stream.read(stream.states[-1:]))[0].float()
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item()):
        raise ValueError(
            f"the last state of {type(model).__name__}, normed and multiplied by its head, is not its prediction (off by "
            f"{(found - expected).abs().max():.1e}): its head does something that the lens does not know"
        )
    return stream


def _reference(model: Any, ids: Tensor, position: int) -> tuple[Stream, Tensor]:
    states: list[Tensor] = []
    with ExitStack() as hooks:
        first = model.blocks[0].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0, position]))
        after = [
            block.register_forward_hook(lambda _, __, out: states.append(out[0, position])) for block in model.blocks
        ]
        for hook in (first, *after):
            hooks.callback(hook.remove)
        logits = model(ids)
    return Stream(torch.stack(states), model.norm, model.interface.logits), logits


def _hugging_face(model: Any, ids: Tensor, position: int) -> tuple[Stream, Tensor]:
    _, head = embedding_and_head(model)
    calls: list[tuple[nn.Module, Any, Any]] = []  # of every module, in order
    with ExitStack() as hooks:
        for module in model.modules():
            hook = module.register_forward_hook(lambda module, inputs, out: calls.append((module, inputs, out)))
            hooks.callback(hook.remove)
        output = model(ids, output_hidden_states=True, use_cache=False)
    last = output.hidden_states[-1]
    # by storage, for some models reshape the norm's output; the calls hold theirs, so that none is used twice
    made = [(module, inputs[0]) for module, inputs, out in calls if inputs and _is_view(out, last)]
    if not made:
        raise ValueError(
            f"found no final norm in {type(model).__name__}: expected a module whose output is hidden_states[-1]"
        )
    norm, before = made[0]  # the innermost comes first
    states = [state[0, position] for state in output.hidden_states[:-1]] + [before[0, position]]
    return Stream(torch.stack(states), norm, lambda state: _scaled(model.config, head(state))), output.logits


def _is_view(out: Any, of: Tensor) -> bool:
    return isinstance(out, Tensor) and out.data_ptr() == of.data_ptr() and out.numel() == of.numel()


def _scaled(config: Any, logits: Tensor) -> Tensor:
    """What some models do after the head: Granite divides, Cohere multiplies, Gemma caps."""
    text = config.get_text_config()
    logits = logits / getattr(text, "logits_scaling", 1) * (getattr(text, "logit_scale", None) or 1)
    cap = getattr(text, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)
