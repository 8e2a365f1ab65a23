"""Closes objects at the end of a test."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Protocol, TypeVar


class _Closes(Protocol):
    def close(self) -> None: ...


_Kept = TypeVar("_Kept", bound=_Closes)


class Keep(Protocol):
    """Registers an object to be closed at the end of the test, the last one first."""

    def __call__(self, opened: _Kept) -> _Kept: ...


@contextmanager
def keeping() -> Iterator[Keep]:
    with ExitStack() as stack:
        yield lambda opened: stack.enter_context(closing(opened))
