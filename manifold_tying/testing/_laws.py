"""Contracts: lists of laws, each of which hypothesis tries to break separately."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

Subject = TypeVar("Subject")
T = TypeVar("T")


class Draw(Protocol):
    """``draw(strategy, label)``; a failing example shows the label."""

    def __call__(self, strategy: st.SearchStrategy[T], label: str) -> T: ...


class NotApplicable(Exception):
    """Raised by a law that does not apply to the subject or the example."""


@contextmanager
def skip_on(error: type[Exception]) -> Iterator[None]:
    """Skip a law whose subject raises this error; also wraps a function: ``skip_on(error)(function)``."""
    try:
        yield
    except error:
        raise NotApplicable from None


@dataclass(frozen=True)
class Law(Generic[Subject]):
    """A named property: ``holds(subject, draw)`` takes examples from ``draw`` and raises if one breaks it."""

    name: str
    holds: Callable[[Subject, Draw], None]


class BrokenLaws(AssertionError):
    """One or more laws of a contract are broken.

    ``broken`` maps each law's name to the error and the smallest example that causes it.
    """

    def __init__(self, subject: str, broken: dict[str, str]) -> None:
        self.broken = broken
        laws = "".join(f"\n\n{name}\n    {text}" for name, text in broken.items())
        super().__init__(f"{subject} breaks {len(broken)} law{'s' * (len(broken) > 1)} ({'; '.join(broken)}):{laws}")


BrokenLaws.__module__ = "manifold_tying.testing"  # in tracebacks


def check(laws: Sequence[Law[Subject]], subject: Subject, label: str, skip: Collection[str]) -> None:
    """Check every law except those in ``skip``, with hypothesis' current profile.

    Raises:
        BrokenLaws: lists all broken laws.
        ValueError: a name in ``skip`` is not a law of this contract.
    """
    __tracebackhide__ = True  # pytest then shows the caller's line
    if unknown := set(skip) - {law.name for law in laws}:
        names = "".join(f"\n  {law.name}" for law in laws)
        given = ", ".join(sorted(unknown))
        raise ValueError(f"expected laws of this contract in skip=, got {given}; choose from:{names}")
    broken = {law.name: text for law in laws if law.name not in skip and (text := _what_breaks(law, subject))}
    if broken:
        raise BrokenLaws(label, broken)


def _what_breaks(law: Law[Subject], subject: Subject) -> str:
    """The error and the smallest example that breaks the law; empty if none was found."""
    drawn: list[tuple[str, object]] = []  # shown only if the law breaks: the text of a tensor takes a millisecond

    @settings(deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def law_holds(data: st.DataObject) -> None:
        drawn.clear()

        def draw(strategy: st.SearchStrategy[T], label: str) -> T:
            value = data.draw(strategy)
            drawn.append((label, value.clone() if isinstance(value, Tensor) else value))  # a law may write to it
            return value

        with suppress(NotApplicable):
            law.holds(subject, draw)

    try:
        law_holds()
    except Exception as error:  # any exception from user code breaks the law
        first = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        example = "; ".join(f"{label}: {value!r}" for label, value in drawn)
        return f"{first}{error}" + (f"\n    example: {example}" if drawn else "")
    return ""
