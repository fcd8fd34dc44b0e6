"""Pure tensor functions behind everything else: products of d x d Gram matrices instead of factorizations of V x d.

Leading dimensions are batch dimensions. float32 and float64 are computed as they are, bfloat16 and float16 in float32 and
cast back; autocast and TF32 are off inside.
"""

from manifold_tying.linalg._basics import autocast_off as autocast_off
from manifold_tying.linalg._basics import check_finite as check_finite
from manifold_tying.linalg._basics import check_square as check_square
from manifold_tying.linalg._basics import check_tall as check_tall
from manifold_tying.linalg._basics import check_whole as check_whole
from manifold_tying.linalg._basics import full_precision as full_precision
from manifold_tying.linalg._basics import gram as gram
from manifold_tying.linalg._basics import identity_like as identity_like
from manifold_tying.linalg._basics import is_autocast_on as is_autocast_on
from manifold_tying.linalg._basics import product_dtype as product_dtype
from manifold_tying.linalg._basics import row_blocks as row_blocks
from manifold_tying.linalg._basics import symmetric as symmetric
from manifold_tying.linalg._basics import working_dtype as working_dtype
from manifold_tying.linalg._cayley import cayley as cayley
from manifold_tying.linalg._cayley import cayley_at as cayley_at
from manifold_tying.linalg._cayley import cayley_neumann as cayley_neumann
from manifold_tying.linalg._cayley import skew as skew
from manifold_tying.linalg._cayley import unskew as unskew
from manifold_tying.linalg._closed_form import closed_form as closed_form
from manifold_tying.linalg._closed_form import has_values as has_values
from manifold_tying.linalg._closed_form import is_traced as is_traced
from manifold_tying.linalg._closed_form import is_transformed as is_transformed
from manifold_tying.linalg._closed_form import recomputed as recomputed
from manifold_tying.linalg._closed_form import refused as refused
from manifold_tying.linalg._closed_form import save as save
from manifold_tying.linalg._closed_form import saved as saved
from manifold_tying.linalg._inverse_sqrt import inverse_sqrt as inverse_sqrt
from manifold_tying.linalg._orthonormalize import Orthonormalization as Orthonormalization
from manifold_tying.linalg._orthonormalize import orthonormalize as orthonormalize
from manifold_tying.linalg._polar import polar as polar
from manifold_tying.linalg._reorthonormalize import reorthonormalize as reorthonormalize
from manifold_tying.linalg._reorthonormalize import reorthonormalize_ as reorthonormalize_
from manifold_tying.linalg._rows import Total as Total
from manifold_tying.linalg._rows import assign_ as assign_
from manifold_tying.linalg._rows import by_rows as by_rows
from manifold_tying.linalg._rows import check_rows as check_rows
from manifold_tying.linalg._rows import defect as defect
from manifold_tying.linalg._rows import distributed_like as distributed_like
from manifold_tying.linalg._rows import first_row as first_row
from manifold_tying.linalg._rows import gram_in_double as gram_in_double
from manifold_tying.linalg._rows import is_distributed as is_distributed
from manifold_tying.linalg._rows import local as local
from manifold_tying.linalg._rows import local_like as local_like
from manifold_tying.linalg._rows import normal_rows_ as normal_rows_
from manifold_tying.linalg._rows import nothing_to_add as nothing_to_add
from manifold_tying.linalg._rows import orthonormalize_rows_ as orthonormalize_rows_
from manifold_tying.linalg._rows import process_total as process_total
from manifold_tying.linalg._rows import reshard as reshard
from manifold_tying.linalg._rows import row_total as row_total
from manifold_tying.linalg._rows import whole as whole
