"""Parse command-line arguments into configurations."""

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any

import tyro

from manifold_tying.training.config import Settings

# tyro shows each section as a group of options.
_SECTIONS = [(kind.__name__.lower(), kind, field(default_factory=kind)) for kind in Settings.__bases__[::-1]]
_Sections = make_dataclass("_Sections", _SECTIONS, frozen=True, kw_only=True)


def parsed(kind: type, command: str, arguments: Sequence[str]) -> Any:
    """Parse the configuration of a command. SystemExit after --help or for a wrong type, ValueError for a wrong value."""
    names = [field.name for field in fields(kind)]
    # tyro would print a ValueError in a box, under a name that the user never wrote, so we validate after it.
    unchecked = make_dataclass(
        kind.__name__,
        [("settings", Annotated[_Sections, tyro.conf.arg(name="")])] if "settings" in names else [],
        bases=(kind,),
        namespace={"__doc__": kind.__doc__, "__post_init__": lambda self: None},
        frozen=True,
        kw_only=True,
    )
    prog, config = f"manifold-tying {command}", (tyro.conf.OmitArgPrefixes,)
    found: Any = tyro.cli(unchecked, prog=prog, args=arguments, config=config)
    values = {name: getattr(found, name) for name in names}
    if "settings" in values:
        values["settings"] = Settings(**{k: v for part in vars(found.settings).values() for k, v in vars(part).items()})
    return kind(**values)
