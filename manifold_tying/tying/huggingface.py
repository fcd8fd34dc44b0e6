"""The old import path of `manifold_tying.huggingface`."""

from manifold_tying.huggingface import PITEmbedding as PITEmbedding
from manifold_tying.huggingface import PITHead as PITHead
from manifold_tying.huggingface import conversion_losses as conversion_losses
from manifold_tying.huggingface import convert as convert
from manifold_tying.huggingface import export as export
from manifold_tying.huggingface import halves as halves
from manifold_tying.huggingface import load as load
from manifold_tying.huggingface import rotation_scales as rotation_scales
from manifold_tying.huggingface import save as save
from manifold_tying.huggingface import train_interface as train_interface
