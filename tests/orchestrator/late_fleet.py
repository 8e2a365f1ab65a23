"""Fleets whose requests wait at the head until the replica that they are charged to can begin them."""

from typing import Any

from tests.fakes.fleet import FakeFleet
from tests.fakes.links import FakeLink
from vllm_omni_plugin.balancing import LeastTokensBalancer
from vllm_omni_plugin.orchestrator.pool.reserve import Reserve

TWO_AT_MOST = Reserve(waits=True, recalls=True)
"""An engine gets one request to begin and one behind it."""


def late(replicas: int = 1, reserve: Reserve = TWO_AT_MOST, **options: Any) -> FakeFleet:
    return FakeFleet(replicas, LeastTokensBalancer(), reserve=reserve, **options)


async def submit_all(fleet: FakeFleet, names: str, **fields: Any) -> None:
    for name in names:
        await fleet.submit(name, prompt=[1, 2], **fields)


def got(link: FakeLink) -> str:
    """The requests that an engine got, in order."""
    return "".join(attempt[0] for attempt in link.added)
