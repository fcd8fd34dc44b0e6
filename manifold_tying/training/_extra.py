"""What is said where the packages of the extra ``train`` are missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra() -> Iterator[None]:
    """Inside, a package that is not installed is a ModuleNotFoundError that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "manifold_tying":
            raise  # a mistake of ours
        raise ModuleNotFoundError(
            f"{error}: training and the command line need more packages; install the extra: pip install "
            "'manifold-tying[train]' (from a checkout: pip install '.[train]')",
            name=error.name,
        ) from error
