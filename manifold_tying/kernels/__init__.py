"""What a CUDA device does in fewer or faster kernels than PyTorch's own operations, one after the other, would launch there."""

from manifold_tying.kernels._choice import runs_eagerly_on_gpu as runs_eagerly_on_gpu
from manifold_tying.kernels._choice import runs_triton as runs_triton
from manifold_tying.kernels._cross_entropy import LossForm as LossForm
from manifold_tying.kernels._cross_entropy import cross_entropy_ as cross_entropy_
from manifold_tying.kernels._products import add_product_ as add_product_
from manifold_tying.kernels._products import split_gram as split_gram
from manifold_tying.kernels._products import split_product as split_product
from manifold_tying.kernels._products import splits as splits
from manifold_tying.kernels._rotation import cubic_blocks as cubic_blocks
from manifold_tying.kernels._rotation import cubic_gradient as cubic_gradient
from manifold_tying.kernels._rotation import from_columns as from_columns
from manifold_tying.kernels._rotation import to_columns as to_columns
