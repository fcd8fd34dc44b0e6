"""Text to token directories, and token directories to batches."""

from ._batches import Batches, validation_batches
from ._corpus import SPEC_FORMS
from ._prepare import cache_directory, prepare
from ._tokens import Meta, TokenData, TokenView, open_tokens

__all__ = [
    "SPEC_FORMS",
    "Batches",
    "Meta",
    "TokenData",
    "TokenView",
    "cache_directory",
    "open_tokens",
    "prepare",
    "validation_batches",
]
