"""Draining a head."""

import asyncio

from fastapi import Request

from tests.admin.asgi import app_of, client_of
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admin.hold import Hold, HoldMiddleware
from vllm_omni_plugin.admin.operator_actions import DRAINING, HeadDrain
from vllm_omni_plugin.orchestrator.event_log import EventLog


async def never() -> None:
    await asyncio.Event().wait()


async def test_new_requests_are_refused_and_those_in_flight_finish() -> None:
    fleet = FakeFleet(replicas=1)
    app = app_of(fleet)
    answer_now, taken = asyncio.Event(), asyncio.Event()

    @app.post("/v1/completions")
    async def complete(_: Request) -> str:
        taken.set()
        await answer_now.wait()
        return "whole"

    drain: HeadDrain = app.state.omni_drain
    app.state.omni_hold = Hold(fleet.orchestrator, never, 60.0, lambda: DRAINING if drain.active else "", never)
    app.add_middleware(HoldMiddleware, paths=frozenset({"/v1/completions"}), has_key=lambda _: True)
    async with fleet, client_of(app) as client:
        early = asyncio.create_task(client.post("/v1/completions"))
        await taken.wait()
        assert (await client.post("/omni/drain")).status_code == 204
        late = await client.post("/v1/completions")
        assert (late.status_code, late.headers["retry-after"]) == (503, "5")
        assert late.json()["error"]["message"] == DRAINING
        answer_now.set()
        assert (await early).json() == "whole"
        assert (await client.post("/omni/resume")).status_code == 204
        assert (await client.post("/v1/completions")).status_code == 200
        assert fleet.orchestrator.metrics.requests_failed_before_accept == 1


def test_the_api_servers_of_a_command_drain_together() -> None:
    flag = [0]
    logs = [EventLog(), EventLog()]
    one, other = (HeadDrain(log) for log in logs)
    for drain in (one, other):
        drain.use_shared_flag(flag)
    one.begin()
    one.begin()
    assert other.active
    other.end()
    assert not one.active
    assert [[event.kind.value for event in log.after()] for log in logs] == [["drain"], ["resume"]]
