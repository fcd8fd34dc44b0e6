"""New members of PEFT's enumeration of methods, which lists its own only."""

from typing import Any

from peft.utils import PeftType


def peft_type(name: str) -> Any:
    """The member ``name``, such as "POET"."""
    member = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    type.__setattr__(PeftType, name, member)
    PeftType._member_map_[name] = PeftType._value2member_map_[name] = member
    PeftType._member_names_.append(name)
    return member
