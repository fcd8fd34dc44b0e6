"""Orthogonal equivalence W = R W0 P (POET): W0 is fixed, the orthogonal R and P are learned and merged into it."""

from manifold_tying.poet.apply import equivalence as equivalence
from manifold_tying.poet.apply import equivalence_ as equivalence_
from manifold_tying.poet.apply import keep_plain_weights as keep_plain_weights
from manifold_tying.poet.apply import merge as merge
from manifold_tying.poet.cached import cached_weights as cached_weights
from manifold_tying.poet.parametrization import Equivalence as Equivalence
from manifold_tying.poet.parametrization import check_drift as check_drift
from manifold_tying.poet.parametrization import equivalences as equivalences
from manifold_tying.poet.parametrization import merge_all as merge_all
from manifold_tying.poet.parametrization import version_of as version_of
from manifold_tying.poet.rotation import Blocks as Blocks
from manifold_tying.poet.rotation import Side as Side
from manifold_tying.poet.rotation import both_blocks as both_blocks
from manifold_tying.poet.rotation import deviation as deviation
from manifold_tying.poet.rotation import orthogonal as orthogonal
from manifold_tying.poet.rotation import permute as permute
from manifold_tying.poet.rotation import rotated_columns as rotated_columns
from manifold_tying.poet.rotation import rotated_rows as rotated_rows
from manifold_tying.poet.rotation import transposed as transposed
from manifold_tying.poet.spec import Init as Init
from manifold_tying.poet.spec import RotationSpec as RotationSpec
from manifold_tying.poet.spec import Scheme as Scheme
from manifold_tying.poet.spec import check_options as check_options
from manifold_tying.poet.spec import inverse_order as inverse_order
