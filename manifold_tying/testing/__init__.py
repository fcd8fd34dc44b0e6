"""Property tests for your own manifolds, constraints, optimizers and token interfaces. Needs the extra ``testing``.

Call a ``check_*`` function in a test. It checks the laws of a contract on random examples and reports each broken law with the
smallest example. Hypothesis' current profile sets the number of examples and their randomness.
"""

from manifold_tying._extra import needs_extra as _needs_extra

with _needs_extra("testing", "property tests need"):
    from manifold_tying.testing._assertions import assert_interface_consistent as assert_interface_consistent
    from manifold_tying.testing._assertions import assert_orthonormal as assert_orthonormal
    from manifold_tying.testing._assertions import assert_same_spectrum as assert_same_spectrum
    from manifold_tying.testing._assertions import assert_spd as assert_spd
    from manifold_tying.testing._assertions import rounding as rounding
    from manifold_tying.testing._interface import INTERFACE_LAWS as INTERFACE_LAWS
    from manifold_tying.testing._interface import check_token_interface as check_token_interface
    from manifold_tying.testing._laws import BrokenLaws as BrokenLaws
    from manifold_tying.testing._manifold import MANIFOLD_LAWS as MANIFOLD_LAWS
    from manifold_tying.testing._manifold import check_manifold as check_manifold
    from manifold_tying.testing._manifold_subject import assert_on_manifold as assert_on_manifold
    from manifold_tying.testing._manifold_subject import assert_tangent as assert_tangent
    from manifold_tying.testing._optimizer import OPTIMIZER_LAWS as OPTIMIZER_LAWS
    from manifold_tying.testing._optimizer import check_optimizer as check_optimizer
    from manifold_tying.testing._parametrization import PARAMETRIZATION_LAWS as PARAMETRIZATION_LAWS
    from manifold_tying.testing._parametrization import check_parametrization as check_parametrization
    from manifold_tying.testing._strategies import points as points
    from manifold_tying.testing._strategies import tall_shapes as tall_shapes
    from manifold_tying.testing._strategies import tangent_vectors as tangent_vectors
    from manifold_tying.testing._strategies import token_ids as token_ids
