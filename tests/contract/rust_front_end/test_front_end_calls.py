"""Calls of a front end to its engine that mean something else to a fleet: of adapters, and of trainers."""

from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.outputs import RequestError

from .played import READY, PlayedFrontEnd, RustFleet

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
        # The same files are the same adapter.
        await load(second, "fr", 2, "adapters/fr")
        loaded = [args[0][1] for _, method, args in link.calls if method == "add_lora"]
        assert (loaded[0], loaded[-1], len(set(loaded))) == (french.lora_int_id, french.lora_int_id, 2)


async def test_an_unloaded_adapter_is_the_fleets_own(fleet: RustFleet, front_end: PlayedFrontEnd) -> None:
    fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, True))
    await load(front_end, *ADAPTER)
    await front_end.call(2, "remove_lora", 1)
    assert (await front_end.read()).utility_output.result.result is True
    for link in fleet.links.values():
        (_, added), (_, removed) = [(method, args[0]) for _, method, args in link.calls]
        assert added[1] == removed


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
