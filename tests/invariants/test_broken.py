"""Every law of every contract can fail: what breaks it breaks it alone."""

from typing import Any

import broken
import pytest

from manifold_tying.testing import (
    INTERFACE_LAWS,
    MANIFOLD_LAWS,
    OPTIMIZER_LAWS,
    PARAMETRIZATION_LAWS,
    BrokenLaws,
)

ZOO: dict[str, tuple[Any, dict[str, broken.Check]]] = {
    "manifold": (MANIFOLD_LAWS, dict(broken.manifolds())),
    "optimizer": (OPTIMIZER_LAWS, dict(broken.optimizers())),
    "parametrization": (PARAMETRIZATION_LAWS, dict(broken.parametrizations())),
    "interface": (INTERFACE_LAWS, dict(broken.interfaces())),
}


pytestmark = pytest.mark.usefixtures("without_shrinking")


@pytest.mark.parametrize(("kind", "law"), [(kind, law) for kind, (_, checks) in ZOO.items() for law in checks])
def test_what_breaks_a_law_breaks_it_alone(kind: str, law: str) -> None:
    with pytest.raises(BrokenLaws) as caught:
        ZOO[kind][1][law]()
    assert set(caught.value.broken) == {law}
    assert law in str(caught.value)
    assert "example: 1: " in str(caught.value) or law == "invalid ids are rejected"  # which draws nothing


@pytest.mark.parametrize("kind", ZOO)
def test_every_law_is_broken_by_something(kind: str) -> None:
    laws, checks = ZOO[kind]
    assert {law.name for law in laws} == set(checks)
