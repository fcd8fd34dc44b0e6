"""Parse arms from the command line: an interface or a body, and the settings that it changes."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

from manifold_tying._json import NotJSON, parsed
from manifold_tying.training.config import DEFAULTS, Settings, unused_settings
from manifold_tying.training.sections import Body, Interface

ARMS: tuple[Interface, ...] = get_args(Interface)
BODIES: tuple[Body, ...] = get_args(Body)
# All arms start from the same checkpoint; betas would need a comma, which separates arms.
NOT_PER_ARM = {"init_from", "betas"}
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,119}")  # valid as a folder name on every system, and not too long


def run_folder(out: Path, arm: str, seed: int) -> Path:
    """The folder of an arm's run, always directly below ``out``.

    An arm may contain a path (``untied+data=text:../x.txt``); its folder name then has a hash of the arm.
    """
    if SAFE.fullmatch(arm):
        return out / f"{arm}-{seed}"
    slug = re.sub(r"[^A-Za-z0-9._+=-]+", "-", arm)[:60].strip("-.")
    return out / f"{slug}-{hashlib.sha256(arm.encode()).hexdigest()[:8]}-{seed}"


def parse_arm(name: str, shared: Settings) -> tuple[Interface, Settings]:
    """Parse ``interface[+name=value]...`` into the interface and its settings; a ValueError lists the choices.

    A body instead of the interface means this body with untied tables, as in POET's experiments.
    """
    if number := re.search(r"[\d.]+e\+\d+", name, re.IGNORECASE):
        plain = number[0].replace("+", "")
        raise ValueError(f"in an arm + starts the next change; write {plain} for {number[0]} in {name!r}")
    first, *changes = name.split("+")
    fields = DEFAULTS.keys() - NOT_PER_ARM
    values: dict[str, Any] = {}
    interface: Interface = next((arm for arm in ARMS if arm == first), "untied")
    if first in BODIES:
        values["body"], fields = first, fields - {"body"}
    elif first not in ARMS:
        choices = ", ".join(ARMS + BODIES)
        raise ValueError(
            f"unknown arm {first!r}{_near(first, ARMS + BODIES)}; choose from {choices}, with changes as in untied+lr=0.002"
        )
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in fields:
            raise ValueError(
                f"unknown change {change!r} in arm {name!r}{_near(key, fields)}; write name=value with one of {sorted(fields)}"
            )
        if key in values:
            raise ValueError(f"expected each setting once, got {key} twice in arm {name!r}; leave one out")
        values[key] = _value(text, key)
    settings = dataclasses.replace(shared, **values)
    if unused := sorted(unused_settings(interface, settings) & values.keys()):
        raise ValueError(f"{first} does not use {', '.join(unused)}; leave it out of the arm {name!r}")
    return interface, settings


def _near(name: str, known: Iterable[str]) -> str:
    return "".join(f" (did you mean {near}?)" for near in get_close_matches(name, known, 1) if near != name)


def _value(text: str, key: str) -> Any:
    """Parse the text as JSON (numbers, true, null) or as train's options write it (True, None); else it stays a string."""
    try:
        value = parsed({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except NotJSON:
        value = text
    hint = get_type_hints(Settings)[key]
    allowed = {t for t in (int, float, str, bool) if t in (get_args(hint) or (hint,))} or {str}
    fits = type(value) in allowed or (type(value) is int and float in allowed)
    fits |= value is None and type(None) in get_args(hint)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"expected {key} to be of type {' or '.join(t.__name__ for t in allowed)}, got {text!r}")
    return value
