"""Waiting for a condition, with a deadline."""

import asyncio
import itertools
from collections.abc import Callable


async def eventually(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return as soon as the condition holds; fail after thirty seconds."""
    try:
        async with asyncio.timeout(30):
            for turn in itertools.count():
                if condition():
                    return
                # Work of this loop takes a few iterations; for other threads and processes, release the processor.
                await asyncio.sleep(0 if turn < 50 else 0.001)
    except TimeoutError:
        raise AssertionError(f"{what} was not met within thirty seconds") from None
