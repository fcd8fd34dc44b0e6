"""Prepare text as token directories, and cut these into batches."""

from .batches import Batches, validation_batches
from .build import cache_directory, prepare
from .corpus import SPEC_FORMS
from .tokens import Meta, TokenData, open_tokens

__all__ = [
    "SPEC_FORMS",
    "Batches",
    "Meta",
    "TokenData",
    "cache_directory",
    "open_tokens",
    "prepare",
    "validation_batches",
]
