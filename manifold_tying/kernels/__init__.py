"""What a CUDA device does in fewer or faster kernels than PyTorch's own operations, one after the other, would launch there."""

from manifold_tying.kernels._choice import runs_eagerly_on_gpu, runs_triton
from manifold_tying.kernels._cross_entropy import cross_entropy_
from manifold_tying.kernels._products import add_product_, split_product, splits
from manifold_tying.kernels._rotation import cubic_blocks, cubic_gradient, from_columns, to_columns

__all__ = [
    "add_product_",
    "cross_entropy_",
    "cubic_blocks",
    "cubic_gradient",
    "from_columns",
    "runs_eagerly_on_gpu",
    "runs_triton",
    "split_product",
    "splits",
    "to_columns",
]
