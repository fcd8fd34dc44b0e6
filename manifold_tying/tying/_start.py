"""Initial values of a PIT interface: the polar factors of a table, and a check of the bounds."""

import torch
from torch import Tensor

from manifold_tying import linalg, precision
from manifold_tying.parametrizations import Bounds


def check_bounds(low: float, high: float, bounds: Bounds) -> None:
    """ValueError if clamping would change an initial diagonal of L, which ranges from low to high."""
    if not bounds[0] <= low <= high <= bounds[1]:
        raise ValueError(
            f"expected bounds around the diagonal of L at the start, {low:.4g} to {high:.4g}, got {bounds}: clamping would "
            "change T. Widen the bounds, or choose another transform"
        )


def decompose(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factors of a table in float64; ValueError, with the reason, if PIT cannot start from it."""
    if weight.ndim != 2:
        raise ValueError(f"expected an embedding table (V, d), got {tuple(weight.shape)}")
    precision.compute_dtype(weight.dtype)
    V, d = weight.shape
    if V < d:
        raise ValueError(f"expected V >= d, since d orthonormal columns need V >= d rows; got a table of ({V}, {d})")
    U, H = linalg.polar(weight.detach().double())
    singular_values = torch.linalg.eigvalsh(H)
    if not singular_values[0] > 1e-5 * singular_values[-1]:
        raise ValueError(
            f"expected a table of full column rank, got smallest / largest singular value "
            f"{singular_values[0] / singular_values[-1]:.1e} (at least 1e-5 is needed): its polar factor is not determined. "
            "Look for duplicate, constant or zero columns"
        )
    return U, H
