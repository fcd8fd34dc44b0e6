"""Orthogonal equivalence, and LoRA with orthonormal factors, as methods of PEFT: importing this package registers them."""

from manifold_tying._extra import needs_extra

with needs_extra("peft", "adapters need"):
    from manifold_tying.peft.layer import PoetLayer as PoetLayer
    from manifold_tying.peft.model import PoetConfig as PoetConfig
    from manifold_tying.peft.model import PoetModel as PoetModel
    from manifold_tying.peft.oft import convert_oft as convert_oft
    from manifold_tying.peft.stiefel_lora import StiefelLoraConfig as StiefelLoraConfig
    from manifold_tying.peft.stiefel_lora import StiefelLoraModel as StiefelLoraModel
    from manifold_tying.peft.stiefel_lora import export_lora as export_lora
