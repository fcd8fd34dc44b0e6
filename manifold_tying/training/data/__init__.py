"""Prepare text as token directories, and cut these into batches."""

from .batches import Batches, validation_batches
from .build import cache_directory, prepare
from .tokens import TokenData, open_tokens

__all__ = ["Batches", "TokenData", "cache_directory", "open_tokens", "prepare", "validation_batches"]
