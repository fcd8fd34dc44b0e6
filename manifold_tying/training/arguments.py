"""The command line's arguments as configurations."""

from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from typing import Annotated, Any

import tyro

from manifold_tying.training import sections as of
from manifold_tying.training.config import Settings


def parsed(kind: type, command: str, arguments: Sequence[str]) -> Any:
    """The configuration of a command; SystemExit after help and where a word does not fit its option.

    Raises:
        ValueError: the configuration refuses its values.
    """
    names = [field.name for field in fields(kind)]
    # tyro would show a ValueError in a box, under a name that the user never wrote. So nothing is checked inside it.
    unchecked = make_dataclass(
        kind.__name__,
        [("settings", _Settings)] if "settings" in names else [],
        bases=(kind,),
        namespace={"__doc__": kind.__doc__, "__post_init__": lambda self: None},
        frozen=True,
        kw_only=True,
    )
    program = f"manifold-tying {command}"
    found: Any = tyro.cli(unchecked, prog=program, args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    values = {name: getattr(found, name) for name in names}
    if "settings" in values:
        values["settings"] = Settings(**values["settings"])
    return kind(**values)


def _merged(
    *,
    model: of.Model,
    checkpoint: of.Checkpoint,
    data: of.Data,
    length: of.Length,
    adam: of.Adam,
    tables: of.Tables,
    memory: of.Memory,
    transform: of.Transform,
    penalty: of.Penalty,
    poet: of.Poet,
    execution: of.Execution,
) -> dict[str, Any]:
    """The values of all sections; tyro makes a group of options of each."""
    parts = (model, checkpoint, data, length, adam, tables, memory, transform, penalty, poet, execution)
    return {name: value for part in parts for name, value in vars(part).items()}


_Settings = Annotated[dict[str, Any], tyro.conf.arg(name="", constructor=_merged)]
