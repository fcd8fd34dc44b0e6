"""Pure tensor functions behind everything else: products of d x d Gram matrices instead of factorizations of V x d.

Leading dimensions are batch dimensions. float32 and float64 are computed as they are, bfloat16 and float16 in float32 and
cast back; autocast and TF32 are off inside.
"""

from manifold_tying.linalg._basics import check_finite as check_finite
from manifold_tying.linalg._basics import check_square as check_square
from manifold_tying.linalg._basics import check_tall as check_tall
from manifold_tying.linalg._basics import defect as defect
from manifold_tying.linalg._basics import full_precision as full_precision
from manifold_tying.linalg._basics import gram as gram
from manifold_tying.linalg._basics import identity_like as identity_like
from manifold_tying.linalg._basics import row_blocks as row_blocks
from manifold_tying.linalg._basics import symmetric as symmetric
from manifold_tying.linalg._basics import working_dtype as working_dtype
from manifold_tying.linalg._cayley import cayley as cayley
from manifold_tying.linalg._cayley import cayley_at as cayley_at
from manifold_tying.linalg._cayley import cayley_neumann as cayley_neumann
from manifold_tying.linalg._cayley import skew as skew
from manifold_tying.linalg._cayley import unskew as unskew
from manifold_tying.linalg._inverse_sqrt import inverse_sqrt as inverse_sqrt
from manifold_tying.linalg._inverse_sqrt import reorthonormalize as reorthonormalize
from manifold_tying.linalg._inverse_sqrt import reorthonormalize_ as reorthonormalize_
from manifold_tying.linalg._orthonormalize import Orthonormalization as Orthonormalization
from manifold_tying.linalg._orthonormalize import orthonormalize as orthonormalize
from manifold_tying.linalg._polar import polar as polar
