"""Waiting for what other threads and processes do, with a deadline."""

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
                # What this loop itself has yet to do takes a few turns; for anything else, leave it the processor.
                await asyncio.sleep(0 if turn < 50 else 0.001)
    except TimeoutError:
        raise AssertionError(f"{what} did not come to hold") from None
