"""Fleets that several modules share."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.fakes.fleet import FakeFleet

from .head_bus import HeadBus


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet() as fleet:
        yield fleet


@pytest.fixture
def bus() -> HeadBus:
    return HeadBus()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Ends the heads of a test."""
    async with AsyncExitStack() as stack:
        yield stack
