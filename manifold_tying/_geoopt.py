"""Import geoopt without its import-time warnings."""

import warnings
from collections.abc import Sequence

with warnings.catch_warnings():
    # geoopt 0.5.1 uses torch.jit.script, which torch deprecates; users cannot act on the warning.
    warnings.filterwarnings("ignore", message="`torch.jit.script")
    import geoopt as geoopt

Size = int | Sequence[int]  # of points: numbers, or one shape
