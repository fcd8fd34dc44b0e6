"""What a machine may lack."""

import os
from typing import NoReturn

import pytest


def lacking(reason: str) -> NoReturn:
    """Skip the test for want of a program; where CI is set, fail, so that it is not skipped unseen."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
