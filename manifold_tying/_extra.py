"""Name the extra to install if one of its packages is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Name the extra in the ModuleNotFoundError of a missing package; ``what`` needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "manifold_tying":
            raise  # our own bug
        raise ModuleNotFoundError(
            f"{error}: {what} more packages; install the extra: pip install 'manifold-tying[{extra}]' (from a checkout: "
            f"pip install '.[{extra}]')",
            name=error.name,
        ) from error
