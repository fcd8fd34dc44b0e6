"""The linear layer with W = R W0 P, and which of its two formulations takes less."""

from torch import Tensor

from manifold_tying import linalg
from manifold_tying.parametrizations._input_centric import input_centric_linear
from manifold_tying.parametrizations._orders import Orders
from manifold_tying.parametrizations._primitive import Primitive
from manifold_tying.parametrizations._rotations import Rotations
from manifold_tying.parametrizations._weight_centric import weight_centric_linear

# Operations of the products at hand that an entry moved takes the time of, and that one in float32 does where those are in
# bfloat16: fitted to both formulations at 18 sizes on a CPU of 0.3 and 1 TFLOP/s. An H200's data sheet says 100, 600 and 14.
_MOVE, _MOVE_LOW, _WIDE = 750, 2700, 12


def equivalence_linear(
    x: Tensor,
    ordered_base: Tensor,
    stored: Tensor,
    rotations: Rotations,
    orders: Orders,
    bias: Tensor | None = None,
    *,
    input_centric: bool,
) -> Tensor:
    """x Wᵀ + bias for W = R W0 P: x (..., n), W0 (m, n), bias (m,) to (..., m), in x's dtype (autocast's, where it is on).

    W0 lies with its rows and columns in the order in which they rotate.

    Input-centric: ((x Pᵀ) W0ᵀ) Rᵀ + bias, which never forms W and keeps x, x Pᵀ W0ᵀ and nothing else. Weight-centric: W is
    formed in the stored vector's dtype, cast to x's, used, and formed again in the backward; it keeps x. Equal to rounding.
    """
    x = x.to(linalg.product_dtype(x))
    bias = None if bias is None else bias.to(x.dtype)
    if not input_centric:
        return weight_centric_linear(x, ordered_base, bias, stored, rotations, *orders)
    flat = x.flatten(0, -2) if x.ndim > 1 else x[None]
    y = input_centric_linear(flat, ordered_base, bias, stored, rotations, *orders)
    return y.view(*x.shape[:-1], len(ordered_base))


def linear_operations(tokens: int, R: Primitive, P: Primitive, *, input_centric: bool, training: bool = True) -> int:
    """Operations of a linear layer's products, those of the Cayley maps aside; nn.Linear's are 6Tmn, and 2Tmn forward alone.

    With T tokens, W (m, n) and blocks of b on both sides the forward and backward take 4Tmn + 6T(m + n)b operations
    input-centric, 6Tmn + 14mnb weight-centric: four products of mnb form W twice, three are its gradient. Without a
    backward 2Tmn + 2T(m + n)b and 2Tmn + 4mnb.
    """
    m, n = R.n, P.n
    of_tokens = tokens * (R.covered * R.block + P.covered * P.block)
    of_weight = n * R.covered * R.block + m * P.covered * P.block
    if not training:
        return 2 * tokens * m * n + 2 * (of_tokens if input_centric else of_weight)
    return 4 * tokens * m * n + 6 * of_tokens if input_centric else 6 * tokens * m * n + 7 * of_weight


def entries_moved(tokens: int, R: Primitive, P: Primitive, *, input_centric: bool, training: bool = True) -> int:
    """How many entries are gathered into another order, which takes time and no operations.

    Input-centric T(2m + 3n), weight-centric 6mn in a forward and backward; without a backward T(m + n) and 2mn.
    """
    m, n = R.n * (R.covered > 0), P.n * (P.covered > 0)
    if not input_centric:
        return (3 if training else 1) * (m * P.n + R.n * n)
    return tokens * (2 * m + 3 * n) if training else tokens * (m + n)


def prefers_input_centric(
    tokens: int, R: Primitive, P: Primitive, *, training: bool = True, low_precision: bool = False
) -> bool:
    """Whether rotating the activations takes less time than forming W, by operations and entries moved.

    Args:
        low_precision: whether the activations, and so all products but those that form W, are 16 bits wide.
    """

    def cost(input_centric: bool) -> int:
        options = {"input_centric": input_centric, "training": training}
        operations = linear_operations(tokens, R, P, **options)
        if low_precision and not input_centric:
            operations += (_WIDE - 1) * linear_operations(0, R, P, **options)
        return operations + (_MOVE_LOW if low_precision else _MOVE) * entries_moved(tokens, R, P, **options)

    return cost(True) <= cost(False)
