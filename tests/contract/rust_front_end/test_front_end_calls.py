"""Calls of a front end to its engine that mean something else to a fleet: of adapters, and of trainers."""

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestError

from tests.fakes.conditions import eventually
from vllm_omni_plugin.integration.rust_front_end import fleet_adapters
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import EngineStateUpdate

from .played import PATIENCE_S, READY, PlayedFrontEnd, RustFleet

ADAPTER = ["fr", 1, "adapters/fr"]


async def load(front_end: PlayedFrontEnd, *adapter: Any) -> None:
    await front_end.call(1, "add_lora", adapter)
    assert (await front_end.read()).utility_output.result.result is True


async def test_adapters_that_two_front_ends_give_one_id_are_two_in_the_fleet(
    fleet: RustFleet, front_end: PlayedFrontEnd, sockets: Path
) -> None:
    fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, True))
    await load(front_end, "fr", 1, "adapters/fr")
    await front_end.add("a-1", lora_request=LoRARequest("fr", 1, "adapters/fr"))
    await fleet.has("a-1")
    link, engine_id = fleet.run_of("a-1")
    french = link.requests[engine_id].lora_request
    assert (french.lora_name, french.lora_path) == ("fr", "adapters/fr")
    async with PlayedFrontEnd(sockets) as second:
        fleet.link.connect(second.addresses, READY)
        await second.greeted()
        await load(second, "de", 1, "adapters/de")
        await second.add("b-1", lora_request=LoRARequest("de", 1, "adapters/de"))
        await fleet.has("b-1")
        link, engine_id = fleet.run_of("b-1")
        assert link.requests[engine_id].lora_request.lora_int_id != french.lora_int_id
        # The fleet has this one already.
        await load(second, "fr", 2, "adapters/fr")
        await second.add("b-2", lora_request=LoRARequest("fr", 2, "adapters/fr"))
        await fleet.has("b-1", "b-2")
        link, engine_id = fleet.run_of("b-2")
        assert link.requests[engine_id].lora_request == french
        assert [args[0][0] for _, method, args in link.calls] == ["fr", "de"]


async def test_an_adapter_that_is_loaded_in_place_takes_the_place_of_the_one_of_its_name(
    fleet: RustFleet, front_end: PlayedFrontEnd, tmp_path: Path
) -> None:
    fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, True))
    for content in ("old", "new"):
        (tmp_path / "adapter_config.json").write_text(content)
        await load(front_end, "fr", 1, str(tmp_path), None, content == "new")
    link = fleet.links[0]
    (old, _), (new, in_place) = [(args[0][1], args[0][4:5]) for _, _, args in link.calls]
    assert (new != old, in_place) == (True, [True])
    assert [adapter.lora_int_id for adapter in fleet.calls.shared_adapters().values()] == [new]
    await front_end.add("a-1", lora_request=LoRARequest("fr", 1, str(tmp_path)))
    await fleet.has("a-1")
    link, engine_id = fleet.run_of("a-1")
    assert link.requests[engine_id].lora_request.lora_int_id == new


async def test_a_request_for_an_adapter_that_another_head_has_unloaded_is_invalid(
    fleet: RustFleet, front_end: PlayedFrontEnd
) -> None:
    fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, True))
    await load(front_end, *ADAPTER)
    [adapter] = fleet.calls.shared_adapters().values()
    await fleet.calls.forget_lora_async(adapter.lora_int_id)
    fleet.link.give(EngineStateUpdate((), (adapter.lora_int_id,), None, Future()))
    await front_end.add("a-1", lora_request=LoRARequest(*ADAPTER))
    assert (await front_end.read_output()).error.code == "validation_error"
    # The front end is told to unload it, too.
    await front_end.call(2, "remove_lora", 1)
    assert (await front_end.read()).utility_output.result.result is True
    assert fleet.link.adapters.surplus == set()


async def test_an_unloaded_adapter_is_the_fleets_own(fleet: RustFleet, front_end: PlayedFrontEnd) -> None:
    fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, True))
    await load(front_end, *ADAPTER)
    await front_end.call(2, "remove_lora", 1)
    assert (await front_end.read()).utility_output.result.result is True
    for link in fleet.links.values():
        (_, added), (_, removed) = [(method, args[0]) for _, method, args in link.calls]
        assert added[1] == removed


async def test_an_adapter_that_is_loaded_again_since_a_client_left_is_one(
    fleet: RustFleet, front_end: PlayedFrontEnd
) -> None:
    fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, True))
    # The front end has forgotten the first.
    for own_id in (1, 2):
        await load(front_end, "fr", own_id, "adapters/fr")
    await front_end.call(2, "remove_lora", 2)
    assert (await front_end.read()).utility_output.result.result is True
    assert fleet.link.adapters.surplus == set()
    # Another head loads it.
    await fleet.calls.add_lora_async(LoRARequest("fr", 77, "adapters/fr"))
    fleet.link.adapters.refresh()
    assert [adapter.lora_int_id for adapter in fleet.link.adapters.missing] == [77]


@pytest.mark.parametrize("unloads_first", [False, True])
async def test_a_load_that_ends_after_a_later_one_of_its_name_is_not_the_front_ends(
    fleet: RustFleet, front_end: PlayedFrontEnd, monkeypatch: pytest.MonkeyPatch, unloads_first: bool
) -> None:
    fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, True))
    gates = [threading.Event(), threading.Event()]
    left = iter(gates)
    begun: list[threading.Event] = []

    def slow_digest(path: str) -> str:
        begun.append(gate := next(left))
        assert gate.wait(PATIENCE_S)
        return "digest"

    monkeypatch.setattr(fleet_adapters, "adapter_digest", slow_digest)
    adapters = fleet.link.adapters
    loads = []
    # The client of the first has left, so that the front end has forgotten it.
    for own_id in (1, 2):
        loads.append(asyncio.create_task(adapters.add(LoRARequest("fr", own_id, "adapters/fr"))))
        await eventually(lambda own_id=own_id: len(begun) == own_id, "the load")
    for own_id in (2, 1):
        if unloads_first and own_id == 1:
            assert await adapters.remove(2) is True
        gates[own_id - 1].set()
        assert await loads[own_id - 1] is True
    if unloads_first:
        # The fleet has it, so the front end shall load it.
        assert [adapter.lora_name for adapter in adapters.missing] == ["fr"]
        return
    await front_end.call(2, "remove_lora", 2)
    assert (await front_end.read()).utility_output.result.result is True
    assert fleet.calls.shared_adapters() == {}


async def test_an_adapter_is_unloaded_again_since_a_client_left(fleet: RustFleet, front_end: PlayedFrontEnd) -> None:
    # As an engine without the adapter.
    fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, len(link.calls) < 3))
    await load(front_end, *ADAPTER)
    for call_id in (2, 3):
        await front_end.call(call_id, "remove_lora", 1)
        assert (await front_end.read()).utility_output.result.result is True
    assert fleet.link.adapters.surplus == set()


async def test_a_request_for_an_adapter_that_is_not_loaded_is_invalid(
    fleet: RustFleet, front_end: PlayedFrontEnd
) -> None:
    await front_end.add("a-1", lora_request=LoRARequest(*ADAPTER))
    output = await front_end.read_output()
    assert output.error == RequestError("validation_error", "The LoRA adapter 'fr' is not loaded.", False)


async def test_trainers_that_would_wait_for_ever_for_workers_are_refused(
    fleet: RustFleet, front_end: PlayedFrontEnd
) -> None:
    init = {"init_info": {"world_size": 3, "rank_offset": 1}}
    await front_end.call(1, "collective_rpc", "init_weight_transfer_engine", None, [], init)
    assert "/get_world_size" in (await front_end.read()).utility_output.failure_message
    assert not any(link.calls for link in fleet.links.values())
