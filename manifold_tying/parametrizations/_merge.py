"""Merge-then-reinitialize: fold R and P into W0, start again from the identity with other blocks. (POET, section 3.2.)"""

from torch import nn

from manifold_tying import linalg
from manifold_tying.parametrizations._equivalence import Equivalence, equivalences


def merge(module: nn.Module) -> int:
    """Fold every equivalence at or below ``module`` into its W0: W stays, R and P are the identity again, of new blocks.

    W0 <- R W0 P is computed in float32 (float64 for float64). The parameters stay the same objects and are zeroed in place,
    their gradients dropped; an optimizer's moments of them belong to the blocks before. Warns where the skew matrices have
    grown so large that R and P were not orthogonal to 1e-3 any more.

    Returns:
        how many weights were merged.

    >>> from manifold_tying import equivalence
    >>> layer = equivalence(nn.Linear(8, 8))
    >>> merge(layer)
    1
    """
    linalg.reshard(module)
    found = equivalences(module)
    Equivalence.fold_all(found)
    return len(found)
