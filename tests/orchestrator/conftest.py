"""What tests with several heads share."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from .head_bus import HeadBus


@pytest.fixture
def bus() -> HeadBus:
    return HeadBus()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Ends the heads of a test."""
    async with AsyncExitStack() as stack:
        yield stack
