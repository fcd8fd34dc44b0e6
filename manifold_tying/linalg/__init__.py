"""Pure tensor functions: p x p Gram matrices replace factorizations of n x p.

Leading dimensions are batch dimensions. float32 and float64 are computed in their own dtype, bfloat16 and float16 in float32
and cast back; autocast and TF32 are off in the forward. Some gradients follow the user's settings.
"""

from manifold_tying.linalg._cayley import cayley as cayley
from manifold_tying.linalg._cayley import cayley_neumann as cayley_neumann
from manifold_tying.linalg._cayley import skew as skew
from manifold_tying.linalg._cayley_at import cayley_at as cayley_at
from manifold_tying.linalg._cayley_at import cayley_curve as cayley_curve
from manifold_tying.linalg._inverse_sqrt import spd_log as spd_log
from manifold_tying.linalg._msign import msign as msign
from manifold_tying.linalg._msign import tangent_msign as tangent_msign
from manifold_tying.linalg._orthonormalize import Orthonormalization as Orthonormalization
from manifold_tying.linalg._orthonormalize import orthonormalize as orthonormalize
from manifold_tying.linalg._polar import polar as polar
from manifold_tying.linalg._reorthonormalize import defect as defect
from manifold_tying.linalg._reorthonormalize import orthonormalize_rows_ as orthonormalize_rows_
from manifold_tying.linalg._reorthonormalize import reorthonormalize as reorthonormalize
from manifold_tying.linalg._reorthonormalize import reorthonormalize_ as reorthonormalize_
from manifold_tying.linalg._sinkhorn import orthostochastic as orthostochastic
from manifold_tying.linalg._sinkhorn import sinkhorn as sinkhorn
