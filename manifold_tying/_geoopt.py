"""geoopt, without the warnings of its import."""

import warnings

with warnings.catch_warnings():
    # geoopt 0.5.1 compiles its hyperbolic formulas with torch.jit.script, which torch deprecates: not our users' business.
    warnings.filterwarnings("ignore", message="`torch.jit.script")
    import geoopt as geoopt
