"""The configuration and the tuner, registered with PEFT under the name POET."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, register_peft_method
from torch import nn

from manifold_tying.peft._blocks import Rotation, batched
from manifold_tying.peft._method import peft_type
from manifold_tying.peft.layer import Convolution, PoetLayer
from manifold_tying.poet import check_options

POET = peft_type("POET")


@dataclass
class PoetConfig(PeftConfig):
    """Orthogonal finetuning, W = R W0 P with block-diagonal orthogonal R and P that start at the identity.

        model = get_peft_model(model, PoetConfig(block_size=32, target_modules=["q_proj", "v_proj"]))

    Works on activations: W0 is neither copied nor dequantized, and may be quantized. The singular values of W0 are kept
    (POET, arXiv 2506.08001), but for ``magnitude`` and a series. With ``sides="in"`` it is orthogonal finetuning, PEFT's OFT,
    which keeps the angles between rows.

    Args:
        block_size: b, at least 2. A side narrower than b is one block; the last block of a side may be smaller.
        sides: which rotate: "both", "in" (P) or "out" (R).
        map: from skew A to orthogonal blocks: "exact" is the Cayley map (I - A)⁻¹(I + A), "series" its Neumann series,
            "exp" the exponential exp(2A).
        terms: of "series"; None means 2.
        permute: rotate blocks of random dimensions, not of neighbours; drawn from ``seed``.
        magnitude: also learn a factor for each row of W.
        block_share: all blocks of a side are the same one; a smaller last block does not rotate.
        module_dropout: probability with which a block is the identity in a training step.
        seed: of the permutations.
        init_weights: start at the identity; False draws normal skew entries, for tests.
        target_modules: as in PEFT's LoraConfig, also "all-linear"; None chooses LoRA's for the architecture.
        exclude_modules: as in LoraConfig.
        layers_to_transform: as in LoraConfig.
        layers_pattern: as in LoraConfig.
        modules_to_save: as in LoraConfig.

    Raises:
        ValueError: block_size, sides, map, terms, seed or module_dropout out of range.
    """

    block_size: int = 32
    sides: Literal["both", "in", "out"] = "both"
    map: Literal["exact", "series", "exp"] = "exact"
    terms: int | None = None
    permute: bool = False
    magnitude: bool = False
    block_share: bool = False
    module_dropout: float = 0.0
    seed: int = 0
    init_weights: bool = True
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = POET
        if self.map not in ("exact", "series", "exp"):
            raise ValueError(f"unknown map {self.map!r}; choose exact, series or exp")
        if self.map != "series" and self.terms is not None:
            raise ValueError(
                f"terms={self.terms} needs map='series', got map={self.map!r}; set that, or leave terms out"
            )
        check_options("block", self.block_size, None, self.terms, "keep", self.seed, None, self.sides)
        if not (isinstance(self.module_dropout, int | float) and 0 <= self.module_dropout < 1):
            raise ValueError(f"expected 0 <= module_dropout < 1, got {self.module_dropout!r}")
        for name in ("target_modules", "exclude_modules"):
            if isinstance(given := getattr(self, name), list):
                setattr(self, name, set(given))


class PoetModel(BaseTuner):
    """The tuner that :func:`peft.get_peft_model` makes for a :class:`PoetConfig`."""

    prefix = "poet_"
    tuner_layer_cls = PoetLayer
    target_module_mapping: Any = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError("PoetConfig does not mix adapters within a batch; set one adapter, or merge it")
        with batched(self._rotations):
            yield

    def _rotations(self) -> Iterator[Rotation]:
        for layer in self.model.modules():
            if isinstance(layer, PoetLayer):
                yield from map(layer.rotation, layer.names_in_use)

    def _check_merge_allowed(self) -> None:
        super()._check_merge_allowed()
        for layer in self.model.modules():
            if isinstance(layer, PoetLayer):
                layer.base_weight()  # refuses a quantized one before another layer is changed

    def _create_and_replace(self, *args: Any, **_: Any) -> None:
        peft_config, adapter_name, target, target_name, parent, *_rest = args
        if isinstance(target, PoetLayer):
            return target.update_layer(adapter_name, peft_config)
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        linear = hasattr(base, "in_features") or type(base).__name__ == "Conv1D"
        known = linear and not isinstance(parent, nn.MultiheadAttention)  # which reads the weight of its out_proj
        if not (known or (isinstance(base, Convolution) and base.groups == 1)):
            raise ValueError(
                f"PoetConfig rotates linear layers and convolutions of one group that are called, got {base} as "
                f"{target_name!r}; leave it out of target_modules"
            )
        new = PoetLayer(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            new.requires_grad_(False)
        self._replace_module(parent, target_name, new, target)


register_peft_method(name="poet", config_cls=PoetConfig, model_cls=PoetModel)
