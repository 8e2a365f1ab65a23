"""Trainers that connect to the workers of the fleet."""

import asyncio
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError

from tests.fakes.idle_fleet import IdleFleet
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.worker_ranks import WorkerRanks

from .test_engine_client import answered

INIT = "init_weight_transfer_engine"


@pytest.mark.parametrize(
    ("world_size", "is_open", "reason"),
    [(4, False, "is 3, but this fleet has 4 workers"), (5, True, "may join and leave it")],
)
async def test_trainers_that_would_wait_for_ever_are_refused(
    orchestrator: Orchestrator, world_size: int, is_open: bool, reason: str
) -> None:
    fleet = IdleFleet(orchestrator)
    fleet.worker_ranks = four_workers(is_open)
    client = FleetClient(fleet, SimpleNamespace(), [])
    transfer = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": world_size}
    with pytest.raises(GracefulHTTPError, match=reason) as raised:
        await asyncio.wait_for(client.collective_rpc_async(INIT, kwargs={"init_info": transfer}), 10)
    assert raised.value.http_status == HTTPStatus.CONFLICT
    client.shutdown()


@pytest.mark.parametrize(
    ("init_info", "is_open"),
    [({"rank_offset": 1, "world_size": 5}, False), ({"packed": True}, True), ({"world_size": "x"}, True)],
)
async def test_trainers_that_know_all_workers_and_transfers_without_ranks_go_on(
    orchestrator: Orchestrator, init_info: dict[str, Any], is_open: bool
) -> None:
    fleet = IdleFleet(orchestrator)
    fleet.worker_ranks = four_workers(is_open)
    client = FleetClient(fleet, SimpleNamespace(), [])
    connecting = client.collective_rpc_async(INIT, kwargs={"init_info": init_info})
    assert await answered(orchestrator, connecting, [None], [None]) == [None, None]
    client.shutdown()


def four_workers(is_open: bool) -> WorkerRanks:
    members = tuple(SimpleNamespace(replica_id=each, name="", client=object()) for each in range(2))
    pool: Any = SimpleNamespace(stage_id=0, members=members)
    return WorkerRanks([pool], {0: range(2)}, {0: 2}, is_open)
