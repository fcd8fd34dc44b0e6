"""Register converted checkpoints with transformers' ``from_pretrained``, selected by ``quant_method`` in config.json.

Only a quantizer can insert modules into a model before transformers reads the weights. The model counts as quantized only
during loading. This module needs transformers; :mod:`manifold_tying._transformers` imports it.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from manifold_tying import linalg, precision
from manifold_tying.huggingface.checkpoint import check_memory
from manifold_tying.huggingface.files import check_files
from manifold_tying.huggingface.folder import FORMAT, METHOD, check_entry
from manifold_tying.huggingface.install import halves, install
from manifold_tying.huggingface.modules import PITEmbedding, PITHead
from manifold_tying.parametrizations import mark, parametrized
from manifold_tying.tying import PIT

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # circular at run time


@register_quantization_config(METHOD)
class InterfaceConfig(QuantizationConfigMixin):
    """The config.json entry, see ``install.options``."""

    def __init__(self, quant_method: str = METHOD, format: int = 0, **options: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]  # transformers expects its own enum
        self.format = format
        self.options = options

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, "format": self.format, **self.options}


@register_quantizer(METHOD)
class InterfaceLoader(HfQuantizer):
    """Insert an empty interface before the weights are read, validate it afterwards, and leave no other trace."""

    quantization_config: InterfaceConfig

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: "PreTrainedModel", **context: Any) -> None:
        install_empty(model, self.quantization_config, context.get("dtype") or torch.get_default_dtype())
        check_files(model, context.get("checkpoint_files") or ())

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **_: Any) -> None:
        embedding = halves(model)[0]
        check_memory(embedding.interface)
        kind = self.quantization_config.options["memory"]
        if kind != "free":
            memory = parametrized(embedding.interface)["memory"]
            # transformers replaces the parameters, and the new ones require gradients.
            memory.original.requires_grad_(kind == "trainable")
            mark(memory)
            Z = embedding.interface.memory.detach()
            if Z.dtype == torch.float64 and not Z.is_meta and linalg.defect(Z) > 1e-10:
                embedding.interface.memory = Z  # loaded from float32; project, as .double() does
        embedding.weight = nn.Parameter(embedding.weight.new_empty(embedding.num_embeddings, 0), requires_grad=False)
        self.quantization_config.format = FORMAT
        del model.hf_quantizer
        del model.is_quantized, model.quantization_method
        for module in model.modules():
            own = getattr(module, "config", None)
            if isinstance(own, PreTrainedConfig):  # some modules store a number as config
                own.__dict__.pop("_is_quantized", None)
        model.config.quantization_config = self.quantization_config.to_dict()


def install_empty(model: "PreTrainedModel", config: InterfaceConfig, dtype: torch.dtype) -> None:
    """Install the modules that a config.json entry describes, on the meta device."""
    check_entry(config.to_dict())
    if not getattr(model.config, "tie_word_embeddings", False):
        raise ValueError(
            "config.json has both an entry of manifold-tying and tie_word_embeddings=false. Set it to true for a converted "
            "checkpoint, or remove the entry for an exported one"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no head; load a converted checkpoint with AutoModelForCausalLM")
    V, d = cast(Tensor, embedding.weight).shape
    options = dict(config.options)
    bridge, scale, padding_idx = options.pop("bridge"), options.pop("scale"), options.pop("padding_idx")
    rotated = options.pop("rotated", False)  # missing in early versions
    if padding_idx is not None and padding_idx >= V:
        raise ValueError(f"expected a padding_idx below {V} in quantization_config, got {padding_idx}")
    with torch.device("meta"):
        interface = PIT(V, d, **options)
        if bridge:
            interface.bridge = nn.Parameter(torch.empty(d, d, dtype=interface._table().dtype))
    interface = interface.to(precision.compute_dtype(dtype))
    interface = interface.to(dtype)
    new = PITEmbedding(interface, dtype, scale=scale, padding_idx=padding_idx, rotated=rotated)
    if config.format == 1:
        new.weight = nn.Parameter(new.weight.new_empty(0), requires_grad=False)
    install(model, new, PITHead(interface, dtype, getattr(head, "bias", None)))
