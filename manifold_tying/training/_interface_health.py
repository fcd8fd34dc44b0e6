"""How far W_out E = I of a PIT interface may be trusted: when to warn, and when a run has lost it."""

import math
from collections.abc import Mapping
from typing import Any

LARGEST_CONDITION = 1e3  # up to here W_out E = I holds to 1e-4 in float32 (a test holds it)
LARGEST_DELTA_TI = 1e-2
# From here on W_out E need not even be invertible: ‖W_out E - I‖₂ < 1 is what guarantees that.
LOST_DELTA_TI = 1.0


def health_warnings(metrics: Mapping[str, Any], *, bridge: bool = False) -> dict[str, str]:
    """What to tell the user of an interface, by quantity; empty for plain tables and for a healthy PIT interface.

    Args:
        metrics: "cond_transform" and "delta_ti", as an evaluation measures them.
        bridge: whether a bridge stands between the tables, which gives up W_out E = I on purpose.
    """
    condition, delta_ti = metrics.get("cond_transform"), metrics.get("delta_ti")
    if condition is None:
        return {}
    found = {}
    if abs(condition) > LARGEST_CONDITION:  # below zero: written by a version that rounding misled
        found["cond_transform"] = (
            f"cond(T) is {condition:.2g}, above {LARGEST_CONDITION:g}: W_out E = I loses digits. Train with a lower "
            "--transform-lr (with a free table, --lr)"
        )
    if not bridge and delta_ti is not None and delta_ti > LARGEST_DELTA_TI:
        found["delta_ti"] = (
            f"ΔTI = ‖W_out E - I‖ is {delta_ti:.2g}, above {LARGEST_DELTA_TI:g}: W_out no longer inverts E to "
            "working accuracy. Train with a lower --transform-lr (with a free table, --lr)"
        )
    return found


def is_lost(metrics: Mapping[str, Any], *, bridge: bool = False) -> bool:
    """Whether a PIT interface has lost W_out E = I. A run whose loss is not finite has diverged, which is said elsewhere."""
    if bridge or metrics.get("cond_transform") is None or not math.isfinite(metrics["val_loss"]):
        return False
    return metrics["delta_ti"] >= LOST_DELTA_TI
