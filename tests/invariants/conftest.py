"""What the contracts' tests get."""

from collections.abc import Iterator

import pytest
from hypothesis import settings


@pytest.fixture(autouse=True)
def half_the_examples() -> Iterator[None]:
    """A law is tested on dozens of subjects; test_broken.py shows that so many examples find what breaks it."""
    before = settings.get_current_profile_name()
    profile = settings.get_profile(before)
    settings.register_profile("half the examples", profile, max_examples=profile.max_examples // 2)
    settings.load_profile("half the examples")
    yield
    settings.load_profile(before)
