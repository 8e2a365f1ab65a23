"""Fleets whose requests wait at the head until a replica can begin them."""

import random
from typing import Any

from tests.fakes.fleet import FakeFleet
from tests.fakes.links import FakeLink
from vllm_omni_plugin.admission import AdmissionConfig, RequestTerms
from vllm_omni_plugin.balancing import LeastTokensBalancer
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize

LATE = PoolTraits(waits_for_room=True, any_replica=True)
"""An engine of unknown size gets one request to begin and one behind it."""
FLOOD, CALM = RequestTerms("flood"), RequestTerms("calm")
SLOTS = 9
SPARE = 2
"""Half of the root of the slots, rounded up."""

ROOMY = EngineSize(step_tokens=1000, sequences=SLOTS)
EQUALS = AdmissionConfig()


def late(replicas: int = 1, traits: PoolTraits = LATE, **options: Any) -> FakeFleet:
    options.setdefault("balancer", LeastTokensBalancer(rng=random.Random(0)))
    return FakeFleet(replicas, traits=traits, **options)


async def submit_all(fleet: FakeFleet, names: str, **fields: Any) -> None:
    for name in names:
        await fleet.submit(name, prompt=[1, 2], **fields)


def got(link: FakeLink) -> str:
    """The requests that an engine got, in order."""
    return "".join(attempt[0] for attempt in link.added)


async def answer_first(fleet: FakeFleet, name: str, terms: RequestTerms, priority: int = 0) -> None:
    """A request comes and is answered."""
    await fleet.submit(name, prompt=[1, 2], terms=terms, priority=priority)
    fleet.say(name, 1, finish_reason="stop")
