"""The fleet's engine client beside the one of the installed vLLM: no method is missing, and a later one is named."""

import inspect
import re
from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any

import pytest
from vllm.v1.engine import async_llm
from vllm.v1.engine.core_client import EngineCoreClient

from vllm_omni_plugin.integration.engine_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.engine_client.unknown_calls import UnknownCallError, refuse_unknown_calls

NOT_CALLED_BY_ASYNC_LLM = {
    name.removesuffix("_async") for name in vars(EngineCoreClient) if name.endswith("_async")
} | {"execute_dummy_batch_async", "save_sharded_state_async"}
"""What is for engines in the caller's thread, and what nobody calls."""


def vllms_methods() -> dict[str, Any]:
    """The methods of vLLM's base class, less those that make a client."""
    return {name: method for name, method in vars(EngineCoreClient).items() if inspect.isfunction(method)}


def test_everything_that_async_llm_takes_of_its_client_is_there(client: FleetClient) -> None:
    taken = set(re.findall(r"\bengine_core\.(\w+)", inspect.getsource(async_llm)))
    assert {"add_request_async", "resources", "get_output_async"} <= taken
    for name in taken:
        member = getattr(client, name)
        assert getattr(member, "__wrapped__", None) is None, f"{name} is vLLM's own, which raises"


def test_every_other_method_of_vllms_client_is_refused_by_name_and_version(client: FleetClient) -> None:
    refused = {name for name in vllms_methods() if hasattr(getattr(client, name), "__wrapped__")}
    assert refused <= NOT_CALLED_BY_ASYNC_LLM
    for name in refused:
        if name.endswith("_async"):
            continue
        arguments = inspect.signature(getattr(client, name)).parameters
        with pytest.raises(UnknownCallError, match=f"vLLM {re.escape(version('vllm'))} asks the fleet for '{name}'"):
            getattr(client, name)(**dict.fromkeys(arguments))


async def test_a_method_that_is_awaited_is_refused_when_it_is(client: FleetClient) -> None:
    waiting = client.execute_dummy_batch_async()
    with pytest.raises(UnknownCallError, match="'execute_dummy_batch_async', which vllm-omni-plugin"):
        await waiting


def test_a_method_of_a_later_vllm_is_refused_by_name_and_can_be_looked_for(client: FleetClient) -> None:
    assert not hasattr(client, "of_a_later_version_async")
    with pytest.raises(UnknownCallError, match="'of_a_later_version_async'"):
        client.of_a_later_version_async("abort")


def test_what_a_later_base_class_has_is_inherited_if_it_does_something_and_refused_if_not() -> None:
    class Later(ABC):
        def sources(self) -> dict[str, int]:
            return {"a": 1}

        def reset(self) -> None:
            raise NotImplementedError

        @abstractmethod
        def pause(self) -> None: ...

    @refuse_unknown_calls
    class Ours(Later):
        pass

    ours = Ours()
    assert ours.sources() == {"a": 1}
    for name in ("reset", "pause"):
        with pytest.raises(UnknownCallError, match=name):
            getattr(ours, name)()


def test_an_error_in_a_property_of_ours_is_not_taken_for_a_method_that_is_missing() -> None:
    @refuse_unknown_calls
    class Ours:
        @property
        def broken(self) -> None:
            raise AttributeError("what is really wrong")

    with pytest.raises(AttributeError, match="what is really wrong"):
        Ours().broken  # noqa: B018
