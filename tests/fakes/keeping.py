"""What a test opens and does not close itself."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Protocol, TypeVar


class _Closes(Protocol):
    def close(self) -> None: ...


_Kept = TypeVar("_Kept", bound=_Closes)


class Keep(Protocol):
    """Closes what it is given at the end of the test, the last first."""

    def __call__(self, opened: _Kept) -> _Kept: ...


@contextmanager
def keeping() -> Iterator[Keep]:
    with ExitStack() as stack:
        yield lambda opened: stack.enter_context(closing(opened))
