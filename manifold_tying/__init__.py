"""Manifold-constrained parametrizations, Riemannian optimizers and Pseudo-Inverse Tying for PyTorch.

Docstrings cite two papers:

- PIT: "Rethinking Weight Tying: Pseudo-Inverse Tying for LM Stable Training and Updates", arXiv:2602.04556;
- POET: Qiu et al., "Reparameterized LLM Training via Orthogonal Equivalence Transformation", 2025, arXiv:2506.08001.
"""

import warnings as _warnings

with _warnings.catch_warnings():
    # geoopt 0.5.1 compiles its hyperbolic formulas with torch.jit.script, deprecated in torch 2.13: not our users' business.
    _warnings.filterwarnings("ignore", message=r"`torch.jit.script", category=DeprecationWarning)
    import geoopt as _geoopt  # noqa: F401

from manifold_tying import diagnostics as diagnostics
from manifold_tying import linalg as linalg
from manifold_tying import models as models
from manifold_tying import optim as optim
from manifold_tying.manifolds import SPD as SPD
from manifold_tying.manifolds import Stiefel as Stiefel
from manifold_tying.parametrizations import equivalence as equivalence
from manifold_tying.parametrizations import equivalence_ as equivalence_
from manifold_tying.parametrizations import load_adapter as load_adapter
from manifold_tying.parametrizations import materialize as materialize
from manifold_tying.parametrizations import merge as merge
from manifold_tying.parametrizations import orthogonal as orthogonal
from manifold_tying.parametrizations import save_adapter as save_adapter
from manifold_tying.parametrizations import spd as spd
from manifold_tying.parametrizations import stiefel as stiefel
from manifold_tying.tying import PIT as PIT
from manifold_tying.tying import TokenInterface as TokenInterface
from manifold_tying.tying import TransposeTying as TransposeTying
from manifold_tying.tying import Untied as Untied
from manifold_tying.tying import conversion_losses as conversion_losses
from manifold_tying.tying import convert as convert
from manifold_tying.tying import export as export
from manifold_tying.tying import load as load
from manifold_tying.tying import save as save

__version__ = "0.1.0"
