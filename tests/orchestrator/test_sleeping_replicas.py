"""A replica that is paused or asleep when a head finds it stays so until an operator says otherwise."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.orchestrator.remote_fleet import Attachment, Fleet
from tests.orchestrator.test_replica_list import row


class SleepingFleet(Fleet):
    """A head whose replicas are asleep."""

    async def attach(self, *about: Any) -> Any:
        replica = await super().attach(*about)
        replica.sleeps = True
        return replica


@pytest.fixture
async def fleet() -> AsyncIterator[SleepingFleet]:
    async with SleepingFleet() as fleet:
        yield fleet


async def found(fleet: SleepingFleet) -> Attachment:
    fleet.register(row(1))
    await eventually(lambda: fleet.pool.members and fleet.pool.members[0].client is not None)
    (replica,) = fleet.attachments
    return replica


def called(replica: Attachment) -> list[tuple[str, list[Any]]]:
    return [(method, args) for _, method, args in replica.link.calls]


async def test_it_is_not_woken_and_gets_no_requests_until_an_operator_wakes_the_fleet(fleet: SleepingFleet) -> None:
    replica = await found(fleet)
    await fleet.submit("a")
    assert (called(replica), replica.link.added) == ([], [])
    assert fleet.pool.members[0].cordons == {"asleep"}
    assert "(replica 0 gets no new requests: it was found paused or asleep)" in str(fleet.pool.unavailable())
    await fleet.call("wake_up", None)
    assert called(replica) == [("wake_up", [None])]
    await eventually(lambda: replica.link.added)


@pytest.mark.parametrize(
    ("calls", "replayed"),
    [
        ([("sleep", (1, "abort"))], []),
        ([("sleep", (1, "abort")), ("wake_up", (None,))], [("wake_up", [None])]),
        ([("pause_scheduler", ("keep", True)), ("resume_scheduler", ())], [("wake_up", [None])]),
    ],
    ids=["to sleep", "to wake up", "to resume"],
)
async def test_after_an_interruption_it_is_as_the_last_call_to_the_fleet_said(
    fleet: SleepingFleet, calls: list[tuple[str, tuple[Any, ...]]], replayed: list[Any]
) -> None:
    replica = await found(fleet)
    for method, args in calls:
        await fleet.call(method, *args)
    replica.client.mark_dead("the connection to its server broke")
    await eventually(lambda: len(fleet.attachments) == 2 and fleet.pool.members[0].client is not None)
    assert called(fleet.attachments[1]) == replayed
    assert fleet.pool.members[0].cordons == frozenset()
