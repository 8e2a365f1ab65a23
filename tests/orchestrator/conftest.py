"""Fleets that several modules share."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from tests.fakes.fleet import FakeFleet

from .head_bus import FakeHead, HeadBus, joined


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet() as fleet:
        yield fleet


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Work on threads waits for it; it is open when the test ends."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def bus() -> HeadBus:
    return HeadBus()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Ends the heads of a test."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def heads(stack: AsyncExitStack, bus: HeadBus) -> list[FakeHead]:
    """Three heads of one fleet, attached to the same two replicas: "a", "b" and "c"."""
    return [await joined(stack, bus, head_id) for head_id in "abc"]
