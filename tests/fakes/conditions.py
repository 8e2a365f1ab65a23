"""Waiting for a condition, with a deadline."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")


async def eventually(condition: Callable[[], _T | None], what: str = "the condition", seconds: float = 30.0) -> _T:
    """Return what the condition does as soon as that is true; fail after so many seconds."""

    async def ask() -> _T | None:
        return condition()

    return await repeated(ask, what, seconds)


async def repeated(ask: Callable[[], Awaitable[_T | None]], what: str, seconds: float = 30.0) -> _T:
    """Ask a peer that raises no event here until its answer is true; fail after so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            for turn in itertools.count():
                if answer := await ask():
                    return answer
                # Work of this loop takes a few iterations; for other threads and processes, release the processor.
                await asyncio.sleep(0 if turn < 50 else 0.001)
    except TimeoutError:
        raise AssertionError(f"{what} was not met within {seconds:g} seconds") from None
    raise AssertionError("not reached")
