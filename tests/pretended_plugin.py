"""pytest -p pretended_plugin: every test runs on the pretended device."""

from collections.abc import Iterator

from pretended_device import Pretended  # installs the device before torch is imported

import pytest  # isort: skip


@pytest.fixture(autouse=True)
def _pretended() -> Iterator[None]:
    with Pretended():
        yield
