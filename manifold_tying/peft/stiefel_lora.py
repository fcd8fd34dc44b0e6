"""LoRA on the Stiefel manifold, W + U S Vᵀ: PEFT's LoRA with constrained factors, registered as STIEFEL_LORA."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import register_peft_method
from safetensors.torch import save_file
from torch import nn

from manifold_tying.parametrizations import low_rank, parametrized, stiefel
from manifold_tying.peft._method import peft_type

STIEFEL_LORA = peft_type("STIEFEL_LORA")


@dataclasses.dataclass
class StiefelLoraConfig(LoraConfig):
    """LoRA whose factors stay orthonormal: W + (α / r) U S Vᵀ with UᵀU = VᵀV = I, as StelLA has it (arXiv 2510.01938).

        model = get_peft_model(model, StiefelLoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        optimizer = RiemannianAdam(param_groups(model, manifold_lr=1e-3), lr=1e-2)

    ``lora_B`` is U, a point of :func:`manifold_tying.stiefel`; ``lora_A`` is S Vᵀ by :func:`manifold_tying.low_rank`, so that S
    is a rotation times diag(s). s starts at 0. Any other optimizer leaves the manifold and warns. All else, quantized bases
    too, is PEFT's LoRA; :func:`export_lora` writes an adapter that needs neither this package nor its optimizers.

    Options are those of PEFT's LoraConfig. ``init_lora_weights`` is True, or False for random s, for tests.

    Raises:
        ValueError: another ``init_lora_weights``; an embedding, or a bare parameter, as a target.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = STIEFEL_LORA
        if not isinstance(self.init_lora_weights, bool) or self.target_parameters:
            raise ValueError(
                "expected init_lora_weights True or False, since the factors start orthonormal, and no target_parameters, got "
                f"{self.init_lora_weights!r} and {self.target_parameters!r}"
            )


class StiefelLoraModel(LoraModel):
    """The tuner that :func:`peft.get_peft_model` makes for a :class:`StiefelLoraConfig`."""

    def _create_and_replace(self, *args: Any, **options: Any) -> None:
        config, adapter_name, target, target_name, parent, *_ = args
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, nn.Embedding):
            raise ValueError(
                f"StiefelLoraConfig adapts layers with a product, got {target_name!r}, an embedding; leave it out"
            )
        super()._create_and_replace(*args, **options)
        layer: Any = getattr(parent, target_name)
        A, B = (side[adapter_name].float() for side in (layer.lora_A, layer.lora_B))  # as PEFT does by default
        with torch.no_grad():
            nn.init.orthogonal_(B.weight)
            s: Any = parametrized(low_rank(A))["weight"].original2
            stiefel(B)
            if config.init_lora_weights:
                s.zero_()

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        short = re.sub(rf"(\.lora_[AB])\.{re.escape(adapter_name)}(?=\.parametrizations)", r"\1", key)
        return super()._remove_adapter_name_from_key(key, adapter_name) if short == key else short

    def add_weighted_adapter(self, *_: object, **__: object) -> None:
        """ValueError: a sum of factors is not orthonormal."""
        raise ValueError("adapters with orthonormal factors have no weighted sum; export_lora them, and add those")


def export_lora(model: PeftModel, path: str | os.PathLike[str], adapter_name: str = "default") -> None:
    """Write a StiefelLora adapter as one of PEFT's LoRA, the same function to rounding.

    Args:
        model: from ``get_peft_model`` with a :class:`StiefelLoraConfig`.
        path: the folder, created if missing.
        adapter_name: which adapter.
    """
    configs = cast(Any, model.peft_config)
    if not isinstance(config := configs.get(adapter_name), StiefelLoraConfig):
        raise ValueError(f"expected a StiefelLora adapter, got {config!r:.80} as {adapter_name!r} of {[*configs]}")
    names = {field.name for field in dataclasses.fields(LoraConfig) if field.init} - {"peft_type", "inference_mode"}
    plain = LoraConfig(**{name: getattr(config, name) for name in names}, inference_mode=True)
    state = get_peft_model_state_dict(model, adapter_name=adapter_name)  # with biases, magnitudes and modules_to_save
    kept = [key for key in state if not re.search(r"\.lora_[AB]\.parametrizations\.", key)]
    state = {key: state[key].clone() for key in kept} | {  # copies: safetensors refuses a tied table and head
        f"{name}.{side}.weight": getattr(layer, side)[adapter_name].weight.detach().contiguous()
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer) and adapter_name in getattr(layer, "lora_A", ())
        for side in ("lora_A", "lora_B")
    }
    Path(path).mkdir(parents=True, exist_ok=True)
    save_file(state, Path(path) / "adapter_model.safetensors")
    plain.save_pretrained(os.fspath(path))


register_peft_method(
    name="stiefel_lora", config_cls=StiefelLoraConfig, model_cls=cast(Any, StiefelLoraModel), prefix="lora_"
)
