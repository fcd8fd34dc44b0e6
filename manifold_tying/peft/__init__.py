"""Orthogonal equivalence as a method of PEFT: importing this package registers it."""

from manifold_tying._extra import needs_extra

with needs_extra("peft", "adapters need"):
    from manifold_tying.peft.layer import PoetLayer as PoetLayer
    from manifold_tying.peft.model import PoetConfig as PoetConfig
    from manifold_tying.peft.model import PoetModel as PoetModel
