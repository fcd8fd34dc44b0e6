"""Train and save the interface together with PEFT adapters; PEFT alone saves only its own layers."""

import os
from functools import partial
from typing import Any

from torch import nn

from manifold_tying.huggingface.install import halves


def train_interface(peft_model: nn.Module) -> None:
    """Train T, a trainable Z and the bridge along with the adapters of a PeftModel, and save them with the adapters.

    PEFT freezes the base model and saves only the adapters. After this call ``peft_model.save_pretrained``, which Trainer
    uses for checkpoints, also saves the interface. ``PeftModel.from_pretrained`` and a resumed Trainer read it back.

        model = mt.convert(model, memory="trainable")
        lora = peft.get_peft_model(model, config)
        train_interface(lora)
        optimizer = RiemannianAdam(param_groups(lora, manifold_lr=1e-3), lr=1e-4)

    Args:
        peft_model: result of ``peft.get_peft_model`` on a model converted by :func:`manifold_tying.convert`.

    Raises:
        ValueError: ``peft_model`` is not a PeftModel, or its base model is not converted.
    """
    model: Any = peft_model
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        raise ValueError(f"expected a PeftModel from peft.get_peft_model, got {type(model).__name__}")
    base = model.get_base_model()
    embedding, _ = halves(base)
    frozen = base.config.quantization_config["memory"] == "frozen"  # PEFT has frozen every parameter, so ask the config
    for name, parameter in embedding.interface.named_parameters():
        parameter.requires_grad_(not (frozen and "memory" in name))
    model.save_pretrained = partial(_save_with_interface, model)  # pickle would look up a bound method in the class
    embedding.saved_with_adapters = True


def _save_with_interface(peft_model: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> None:
    """``PeftModel.save_pretrained`` that includes the embedding and its interface, which the head shares."""
    state = options.pop("state_dict", None) or peft_model.state_dict()
    _, head = halves(peft_model.get_base_model())
    (name,) = [name for name, module in peft_model.named_modules() if module is head]
    state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{name}.interface.")}
    options = {"save_embedding_layers": True, **options}
    type(peft_model).save_pretrained(peft_model, save_directory, *args, state_dict=state, **options)
