"""The command line's arguments, and what is wrong with them in our own words."""

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any

import tyro


def parsed(kind: type, command: str, arguments: Sequence[str]) -> Any:
    """The configuration of a command; SystemExit after help, and after an error of the parser's.

    Where a configuration refuses its values, tyro says so in a box, under a name that the user never wrote. Here that is
    ValueError, as from anywhere else.
    """
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            found: Any = tyro.cli(
                kind, prog=f"manifold-tying {command}", args=arguments, config=(tyro.conf.OmitArgPrefixes,)
            )
    except SystemExit as stopped:
        if refused := _ours(stopped):
            raise refused from None
        sys.stderr.write(box.getvalue())
        raise
    sys.stderr.write(box.getvalue())
    return found


def _ours(error: BaseException) -> ValueError | None:
    """The ValueError among what led to an error that was raised in this package."""
    cause: BaseException | None = error
    while cause is not None:
        last = cause.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        where = last.tb_frame.f_globals.get("__name__", "") if last else ""
        if isinstance(cause, ValueError) and where.startswith("manifold_tying."):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
