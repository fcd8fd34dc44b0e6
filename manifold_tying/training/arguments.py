"""Parse command-line arguments into configurations."""

from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from typing import Annotated, Any

import tyro

from manifold_tying.training import sections
from manifold_tying.training.config import Settings


def parsed(kind: type, command: str, arguments: Sequence[str]) -> Any:
    """Parse the configuration of a command.

    Raises:
        SystemExit: after --help, or if an argument has the wrong type.
        ValueError: a value is invalid.
    """
    names = [field.name for field in fields(kind)]
    # tyro would print a ValueError in a box, under a name that the user never wrote, so we validate after it.
    unchecked = make_dataclass(
        kind.__name__,
        [("settings", _Settings)] if "settings" in names else [],
        bases=(kind,),
        namespace={"__doc__": kind.__doc__, "__post_init__": lambda self: None},
        frozen=True,
        kw_only=True,
    )
    prog, config = f"manifold-tying {command}", (tyro.conf.OmitArgPrefixes,)
    found: Any = tyro.cli(unchecked, prog=prog, args=arguments, config=config)
    values = {name: getattr(found, name) for name in names}
    if "settings" in values:
        values["settings"] = Settings(**values["settings"])
    return kind(**values)


def _merged(
    *,
    model: sections.Model,
    checkpoint: sections.Checkpoint,
    data: sections.Data,
    length: sections.Length,
    adam: sections.Adam,
    tables: sections.Tables,
    memory: sections.Memory,
    transform: sections.Transform,
    penalty: sections.Penalty,
    poet: sections.Poet,
    execution: sections.Execution,
) -> dict[str, Any]:
    """The values of all sections; tyro shows each section as a group of options."""
    parts = (model, checkpoint, data, length, adam, tables, memory, transform, penalty, poet, execution)
    return {name: value for part in parts for name, value in vars(part).items()}


_Settings = Annotated[dict[str, Any], tyro.conf.arg(name="", constructor=_merged)]
