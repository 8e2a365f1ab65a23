"""The fleet's engine client has all methods of the installed vLLM's client, and refuses later ones by name."""

import asyncio
import inspect
import re
from http import HTTPStatus
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import async_llm

from tests.fakes.idle_fleet import IdleFleet
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.core_client.utility_calls import UnknownCallError, UtilityCallClient
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.worker_ranks import WorkerRanks

from .test_engine_client import answered


def test_everything_that_async_llm_takes_of_its_client_is_there(client: FleetClient) -> None:
    taken = set(re.findall(r"\bengine_core\.(\w+)", inspect.getsource(async_llm)))
    assert {"add_request_async", "resources", "get_output_async"} <= taken
    assert [name for name in taken if not hasattr(client, name)] == []
    for name in taken - vars(client).keys():
        owner = next(owner for owner in type(client).__mro__ if name in vars(owner))
        is_a_call = issubclass(UtilityCallClient, owner) and "self.call_utility" in inspect.getsource(vars(owner)[name])
        assert is_a_call or owner.__module__.startswith("vllm_omni_plugin."), f"{name} is vLLM's own, of {owner}"


@pytest.mark.parametrize(
    ("name", "arguments"), [("execute_dummy_batch_async", ()), ("save_sharded_state_async", ("/anywhere",))]
)
async def test_calls_that_replicas_reject_are_not_sent(
    client: FleetClient, orchestrator: Orchestrator, name: str, arguments: tuple[str, ...]
) -> None:
    with pytest.raises(UnknownCallError, match=f"asks the fleet for '{name.removesuffix('_async')}', which"):
        # Not after an answer, which never comes here.
        async with asyncio.timeout(0):
            await getattr(client, name)(*arguments)
    assert len(orchestrator.rpc_async_queue) == 0


def test_a_method_of_a_later_vllm_is_refused_by_name(client: FleetClient) -> None:
    assert not hasattr(client, "of_a_later_version_async")
    asked = f"vLLM {re.escape(version('vllm'))} asks the fleet for 'of_a_later_version_async', which vllm-omni-plugin"
    with pytest.raises(UnknownCallError, match=asked):
        client.of_a_later_version_async("abort")


def test_an_error_in_a_property_of_ours_is_not_taken_for_a_method_that_is_missing() -> None:
    class Ours(UtilityCallClient):
        @property
        def broken(self) -> None:
            raise AttributeError("what is really wrong")

    with pytest.raises(AttributeError, match="what is really wrong"):
        Ours(None, None, None).broken  # noqa: B018


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
