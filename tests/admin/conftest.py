"""A fleet for the tests of this folder."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.fleet import FakeFleet


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=2) as fleet:
        yield fleet
