"""Convert tied tables of Hugging Face models to PIT, and export stock checkpoints. Imports transformers on first use."""

from manifold_tying.tying.huggingface._adapters import train_interface as train_interface
from manifold_tying.tying.huggingface._checkpoint import load as load
from manifold_tying.tying.huggingface._checkpoint import save as save
from manifold_tying.tying.huggingface._convert import conversion_losses as conversion_losses
from manifold_tying.tying.huggingface._convert import convert as convert
from manifold_tying.tying.huggingface._export import export as export
from manifold_tying.tying.huggingface._install import halves as halves
from manifold_tying.tying.huggingface._modules import PITEmbedding as PITEmbedding
from manifold_tying.tying.huggingface._modules import PITHead as PITHead
from manifold_tying.tying.huggingface._scales import rotation_scales as rotation_scales
