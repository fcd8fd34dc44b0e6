"""Pure tensor functions: p x p Gram matrices replace factorizations of n x p.

Leading dimensions are batch dimensions. float32 and float64 are computed in their own dtype, bfloat16 and float16 in float32
and cast back; autocast and TF32 are off inside.
"""

from manifold_tying.linalg._autograd import custom_gradient as custom_gradient
from manifold_tying.linalg._autograd import has_data as has_data
from manifold_tying.linalg._autograd import in_transform as in_transform
from manifold_tying.linalg._autograd import is_tracing as is_tracing
from manifold_tying.linalg._autograd import no_second_derivative as no_second_derivative
from manifold_tying.linalg._autograd import recomputed as recomputed
from manifold_tying.linalg._autograd import save as save
from manifold_tying.linalg._autograd import saved as saved
from manifold_tying.linalg._cayley import cayley as cayley
from manifold_tying.linalg._cayley import cayley_at as cayley_at
from manifold_tying.linalg._cayley import cayley_neumann as cayley_neumann
from manifold_tying.linalg._cayley import skew as skew
from manifold_tying.linalg._cayley import unskew as unskew
from manifold_tying.linalg._distributed import Reduce as Reduce
from manifold_tying.linalg._distributed import check_row_sharding as check_row_sharding
from manifold_tying.linalg._distributed import copy_rows_ as copy_rows_
from manifold_tying.linalg._distributed import defect as defect
from manifold_tying.linalg._distributed import from_local_like as from_local_like
from manifold_tying.linalg._distributed import full_tensor as full_tensor
from manifold_tying.linalg._distributed import gram_in_double as gram_in_double
from manifold_tying.linalg._distributed import is_dtensor as is_dtensor
from manifold_tying.linalg._distributed import mesh_reduce as mesh_reduce
from manifold_tying.linalg._distributed import no_reduce as no_reduce
from manifold_tying.linalg._distributed import orthonormalize_rows_ as orthonormalize_rows_
from manifold_tying.linalg._distributed import reshard_fsdp as reshard_fsdp
from manifold_tying.linalg._distributed import row_local_map as row_local_map
from manifold_tying.linalg._distributed import row_offset as row_offset
from manifold_tying.linalg._distributed import row_reduce as row_reduce
from manifold_tying.linalg._distributed import shard_like as shard_like
from manifold_tying.linalg._distributed import sharded_normal_ as sharded_normal_
from manifold_tying.linalg._distributed import to_local as to_local
from manifold_tying.linalg._inverse_sqrt import inverse_sqrt as inverse_sqrt
from manifold_tying.linalg._orthonormalize import Orthonormalization as Orthonormalization
from manifold_tying.linalg._orthonormalize import orthonormalize as orthonormalize
from manifold_tying.linalg._polar import polar as polar
from manifold_tying.linalg._precision import autocast_dtype as autocast_dtype
from manifold_tying.linalg._precision import check_finite as check_finite
from manifold_tying.linalg._precision import check_int as check_int
from manifold_tying.linalg._precision import check_square as check_square
from manifold_tying.linalg._precision import check_tall as check_tall
from manifold_tying.linalg._precision import compute_dtype as compute_dtype
from manifold_tying.linalg._precision import disable_autocast as disable_autocast
from manifold_tying.linalg._precision import eye_like as eye_like
from manifold_tying.linalg._precision import full_precision as full_precision
from manifold_tying.linalg._precision import gram as gram
from manifold_tying.linalg._precision import is_autocast_on as is_autocast_on
from manifold_tying.linalg._precision import row_chunks as row_chunks
from manifold_tying.linalg._precision import sym as sym
from manifold_tying.linalg._reorthonormalize import reorthonormalize as reorthonormalize
from manifold_tying.linalg._reorthonormalize import reorthonormalize_ as reorthonormalize_
