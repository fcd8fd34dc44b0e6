"""Manifold-constrained parametrizations, Riemannian optimizers and Pseudo-Inverse Tying for PyTorch."""

import warnings as _warnings

with _warnings.catch_warnings():
    # geoopt 0.5.1 compiles its hyperbolic formulas with torch.jit.script, deprecated in torch 2.13: not our users' business.
    _warnings.filterwarnings("ignore", message=r"`torch.jit.script", category=DeprecationWarning)
    import geoopt as _geoopt  # noqa: F401
