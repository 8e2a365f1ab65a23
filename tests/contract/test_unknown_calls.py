"""The fleet's engine client beside the one of the installed vLLM: no method is missing, and a later one is named."""

import inspect
import re
from importlib.metadata import version

import pytest
from vllm.v1.engine import async_llm

from vllm_omni_plugin.integration.engine_client.engine_calls import EngineCalls, UnknownCallError
from vllm_omni_plugin.integration.engine_client.fleet_client import FleetClient


def test_everything_that_async_llm_takes_of_its_client_is_there(client: FleetClient) -> None:
    taken = set(re.findall(r"\bengine_core\.(\w+)", inspect.getsource(async_llm)))
    assert {"add_request_async", "resources", "get_output_async"} <= taken
    assert [name for name in taken if not hasattr(client, name)] == []


def test_a_method_of_a_later_vllm_is_refused_by_name_and_can_be_looked_for(client: FleetClient) -> None:
    assert not hasattr(client, "of_a_later_version_async")
    asked = f"vLLM {re.escape(version('vllm'))} asks the fleet for 'of_a_later_version_async', which vllm-omni-plugin"
    with pytest.raises(UnknownCallError, match=asked):
        client.of_a_later_version_async("abort")


def test_an_error_in_a_property_of_ours_is_not_taken_for_a_method_that_is_missing() -> None:
    class Ours(EngineCalls):
        @property
        def broken(self) -> None:
            raise AttributeError("what is really wrong")

    with pytest.raises(AttributeError, match="what is really wrong"):
        Ours(None, None).broken  # noqa: B018
