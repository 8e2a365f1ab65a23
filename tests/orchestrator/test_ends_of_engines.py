"""The exit of an engine tells whether it can have crashed of a request."""

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import DEAD_FRAME, FakeRequest
from tests.fakes.fleet import FakeFleet
from tests.orchestrator.local_node import running_node


@pytest.mark.parametrize(
    ("ended", "suspects"),
    [
        ("it was ended by SIGSEGV", 2),
        ("it exited with code 1", 2),
        ("its worker VllmWorker-0 was ended by SIGILL", 2),
        ("it was ended by SIGKILL", 0),
        ("its worker VllmWorker-0 was ended by SIGKILL", 0),
        ("it was ended by SIGTERM", 0),
        ("it was ended by SIGINT", 0),
        pytest.param("it exited with code 0", 0, id="vLLM's way to end at SIGTERM"),
    ],
)
@pytest.mark.parametrize("reports", [True, False])
async def test_only_an_engine_that_crashed_by_itself_makes_what_it_had_suspect(
    ended: str, suspects: int, reports: bool
) -> None:
    async with running_node() as node:
        await node.replicas.start()
        for name in "ab":
            node.submit(FakeRequest(name, affinity=0))
        await eventually(lambda: len(node.orchestrator.request_states) == 2)
        engine = node.engine_of(0)
        engine.process.exit_note = ended
        if reports:
            engine.say(DEAD_FRAME)
        else:
            engine.process.die()
        runs = [state.runs[0] for state in node.orchestrator.request_states.values()]
        await eventually(lambda: all(run.losses for run in runs), "the loss")
        assert sum(len(run.crash_losses) for run in runs) == suspects


async def test_no_request_is_lost_when_a_replica_is_killed_every_five_seconds() -> None:
    async with FakeFleet(replicas=2, replica_wait=600.0) as fleet:
        sent, kills, due, returns, computed = 0, 0, 5.0, dict[int, float](), {0: 0.0, 1: 0.0}
        while sent < 1000 or fleet.orchestrator.request_states:
            while sent < 1000 and len(fleet.orchestrator.request_states) < 16:
                await fleet.submit(f"r{sent}")
                sent += 1
            fleet.now += 0.1
            for replica_id in [replica_id for replica_id, at in returns.items() if at <= fleet.now]:
                del returns[replica_id]
                fleet.join(fleet.pool.member(replica_id))
            for member in fleet.pool.serving:
                # One request after the other, 0.4 s each.
                computed[member.replica_id] += 0.1 * bool(member.in_flight)
                if computed[member.replica_id] >= 0.4:
                    computed[member.replica_id] = 0.0
                    fleet.links[member.replica_id].output(next(iter(member.in_flight)), 5, finish_reason="stop")
            if fleet.now >= due:
                victim, kills, due = kills % 2, kills + 1, due + 5.0
                computed[victim], returns[victim] = 0.0, fleet.now + 2.0
                fleet.kill(victim)
            await fleet.read()
        assert kills > 30
        assert [event for event in fleet.events if event[1] != "stop"] == []
        assert len(fleet.events) == 1000
