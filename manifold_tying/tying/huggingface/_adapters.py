"""Training the interface below PEFT's adapters, which saves by itself only what it put into the model."""

import os
from types import MethodType
from typing import Any

from torch import nn

from manifold_tying.tying.huggingface._install import halves


def train_interface(peft_model: nn.Module) -> None:
    """Train T, a trainable Z and the bridge along with the adapters of a PeftModel, and save them with the adapters.

    PEFT freezes the base model and writes the adapters alone. After this call ``peft_model.save_pretrained``, which Trainer's
    checkpoints use, writes the interface as well; ``PeftModel.from_pretrained`` and a resumed Trainer read it back.

        model = mt.convert(model, memory="trainable")
        lora = peft.get_peft_model(model, config)
        train_interface(lora)
        optimizer = RiemannianAdam(param_groups(lora, manifold_lr=1e-3), lr=1e-4)

    Args:
        peft_model: ``peft.get_peft_model`` of a model converted by :func:`manifold_tying.convert`.

    Raises:
        ValueError: no PeftModel, or not of a converted model.
    """
    model: Any = peft_model
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        raise ValueError(f"expected a PeftModel, as peft.get_peft_model makes it, got {type(model).__name__}")
    base = model.get_base_model()
    embedding, _ = halves(base)
    frozen = (
        base.config.quantization_config["memory"] == "frozen"
    )  # as at the conversion: PEFT has frozen everything since
    for name, parameter in embedding.interface.named_parameters():
        parameter.requires_grad_(not (frozen and "memory" in name))
    model.save_pretrained = MethodType(_save_with_interface, model)
    embedding.saved_with_adapters = True


def _save_with_interface(peft_model: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> None:
    """``PeftModel.save_pretrained`` with the embedding, in which the interface is; the head's is the same one."""
    state = options.pop("state_dict", None) or peft_model.state_dict()
    _, head = halves(peft_model.get_base_model())
    (name,) = [name for name, module in peft_model.named_modules() if module is head]
    state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{name}.interface.")}
    options = {"save_embedding_layers": True, **options}
    type(peft_model).save_pretrained(peft_model, save_directory, *args, state_dict=state, **options)
