"""Convert tied transformers models to PIT, and export stock checkpoints. Imports transformers on first use."""

from manifold_tying.huggingface.checkpoint import export as export
from manifold_tying.huggingface.checkpoint import load as load
from manifold_tying.huggingface.checkpoint import save as save
from manifold_tying.huggingface.conversion import conversion_losses as conversion_losses
from manifold_tying.huggingface.conversion import convert as convert
from manifold_tying.huggingface.native import import_transformers as import_transformers
from manifold_tying.huggingface.rotation import rotation_scales as rotation_scales
