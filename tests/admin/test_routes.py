"""The operator's HTTP routes with fake fleets of one and of several stages."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.admin.asgi import app_of, client_of
from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from tests.fakes.pipeline_fleet import FakePipelineFleet, stage
from vllm_omni_plugin.admin.hold import Hold
from vllm_omni_plugin.admin.operator_actions import FleetAdmin
from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls


@pytest.fixture
async def client(fleet: FakeFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app_of(fleet)) as client:
        yield client


async def replicas(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = await client.get("/omni/replicas")
    assert answer.status_code == 200
    found: list[dict[str, Any]] = answer.json()["replicas"]
    return found


async def test_every_replica_is_listed_with_all_fields(fleet: FakeFleet, client: httpx.AsyncClient) -> None:
    member = fleet.pool.member(1)
    member.assignments, member.restarts, member.remote, member.changed_at = 7, 2, True, 3.0
    member.machines = ("10.0.0.1", "10.0.0.2")
    fleet.now = 10.5
    first, second = await replicas(client)
    assert first["id"] == "0.0"
    assert second == {
        "id": "0.1",
        "stage": 0,
        "replica": 1,
        "status": "up",
        "other_generation": "",
        "cordons": [],
        "remote": True,
        "machines": ["10.0.0.1", "10.0.0.2"],
        "input_addr": member.input_addr,
        "output_addr": member.output_addr,
        "total_in_flight": 0,
        "assigned": 7,
        "restarts": 2,
        "since_seconds": 7.5,
        # The names of version 0.1.
        "held_back": [],
        "in_flight": 0,
        "dispatched": 7,
    }


@pytest.mark.parametrize("address", ["", "tcp://n:1"], ids=["own", "listed, not attached to"])
async def test_a_replica_that_has_not_served_has_no_time(
    fleet: FakeFleet, client: httpx.AsyncClient, address: str
) -> None:
    member = fleet.pool.add()
    member.remote, member.input_addr = bool(address), address
    third = (await replicas(client))[2]
    assert (third["status"], third["input_addr"], third["since_seconds"]) == ("down", address, None)


async def test_a_replica_of_another_generation_is_shown_and_left_to_heads_of_its_kind(
    fleet: FakeFleet, client: httpx.AsyncClient
) -> None:
    fleet.pool.add().other_generation = "dtype: head has a, replica b; no head of its kind"
    third = (await replicas(client))[2]
    assert (third["status"], third["other_generation"]) == (
        "other-generation",
        "dtype: head has a, replica b; no head of its kind",
    )
    for method, path in (("POST", "/drain"), ("POST", "/resume"), ("DELETE", "")):
        answer = await client.request(method, f"/omni/replicas/0.2{path}")
        assert answer.status_code == 409
        assert "is of another generation: ask a head of its kind" in answer.text


async def test_a_drained_replica_gets_no_new_requests_until_it_is_resumed(
    fleet: FakeFleet, client: httpx.AsyncClient
) -> None:
    for _ in range(2):
        assert (await client.post("/omni/replicas/0.1/drain")).status_code == 204
    assert [(r["status"], r["cordons"]) for r in await replicas(client)] == [("up", []), ("draining", ["admin"])]
    assert [member.replica_id for member in fleet.pool.serving] == [0]
    assert (await client.post("/omni/replicas/0.1/resume")).status_code == 204
    assert [member.replica_id for member in fleet.pool.serving] == [0, 1]


async def test_only_a_drained_replica_can_be_resumed(fleet: FakeFleet, client: httpx.AsyncClient) -> None:
    fleet.pool.cordon(fleet.pool.member(1), "late")
    answer = await client.post("/omni/replicas/0.1/resume")
    assert answer.status_code == 409
    assert answer.json()["detail"] == ("Replica 0.1 is not drained by an operator (it is draining, cordoned: late).")


async def test_a_replica_that_is_deleted_is_ended_by_its_keeper(fleet: FakeFleet, client: httpx.AsyncClient) -> None:
    left = []
    for member in fleet.pool.members:
        member.leave = partial(left.append, member)
    fleet.pool.member(1).remote = True
    for replica in ("0.0", "0.1"):
        assert (await client.delete(f"/omni/replicas/{replica}")).status_code == 204
    assert left == [fleet.pool.member(0), fleet.pool.member(1)]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "0.7/drain"), ("POST", "1.0/resume"), ("DELETE", "x"), ("POST", "1/drain")]
)
async def test_an_unknown_id_is_answered_with_the_existing_ones(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    answer = await client.request(method, f"/omni/replicas/{path}")
    assert answer.status_code == 404
    assert answer.json()["detail"] == f"There is no replica {path.partition('/')[0]}. There are: 0.0, 0.1."


async def test_a_replica_that_leaves_during_a_call_is_a_conflict() -> None:
    fleet = FakeFleet(replicas=2)
    async with client_of(app_of(fleet)) as client:
        order = asyncio.ensure_future(client.post("/omni/replicas/0.1/drain"))
        await eventually(lambda: len(fleet.orchestrator.rpc_async_queue), "the order")
        fleet.lose(1)
        fleet.pool.remove(fleet.pool.member(1))
        async with fleet:
            assert (await order).status_code == 409


async def test_a_call_is_answered_when_the_server_ends() -> None:
    fleet = FakeFleet(replicas=1)
    async with client_of(app_of(fleet)) as client:
        order = asyncio.ensure_future(client.post("/omni/replicas/0.0/drain"))
        await eventually(lambda: len(fleet.orchestrator.rpc_async_queue), "the order")
        fleet.orchestrator.close_queues()
        for answer in (await order, await client.post("/omni/replicas/0.0/drain")):
            assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5")


async def test_a_change_is_refused_without_a_coordinator() -> None:
    fleet = FakeFleet()
    fleet.fleet_calls = FleetCalls(fleet.orchestrator, "head", lambda: None)
    fleet.pool.member(1).remote = True
    async with fleet, client_of(app_of(fleet)) as client:
        answer = await client.post("/omni/replicas/0.1/drain")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "coordinator" in answer.json()["detail"]
        assert (await client.post("/omni/replicas/0.0/drain")).status_code == 204, "it is of this head alone"


PREFILL, DECODE, TALKER = range(3)
STAGES = (
    stage(PREFILL, "prefill", "kv_cache", model="one"),
    stage(DECODE, "decode", "text", "prefill", model="one", transform="kv_transfer", final=True),
    stage(TALKER, "talker", "audio", "decode", engine="acme.stages:Any", final=True),
)


async def test_a_change_reaches_the_replica_of_its_stage() -> None:
    async with FakePipelineFleet(STAGES, (1, 2, 1)) as fleet:
        await FleetAdmin(fleet.orchestrator, fleet.fleet_calls, fleet.clock).manage("1.1", "drain")
        assert [member.name for pool in fleet.pools for member in pool.members if member.cordons] == ["1.1"]


async def test_a_request_waits_for_the_stages_with_text_output() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async with FakePipelineFleet(STAGES, (1, 2, 1)) as fleet:
        hold = Hold(fleet.orchestrator, never, 0.0, lambda: "", never)
        for stage_id, replica_id in ((PREFILL, 0), (TALKER, 0), (DECODE, 0)):
            assert not hold.is_needed
            fleet.lose(stage_id, replica_id)
        fleet.lose(DECODE, 1)
        assert hold.is_needed
        with pytest.raises(NoReplicaError, match=r"No replica of stage 1 .*replica 0 is down, replica 1 is down"):
            await hold.wait(never, has_key=True)
