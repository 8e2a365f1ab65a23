"""The fleet's engine client has all methods of the installed vLLM's client, and refuses later ones by name."""

import asyncio
import inspect
import re
from importlib.metadata import version

import pytest
from vllm.v1.engine import async_llm

from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.core_client.utility_calls import UnknownCallError, UtilityCallClient
from vllm_omni_plugin.orchestrator import Orchestrator


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
