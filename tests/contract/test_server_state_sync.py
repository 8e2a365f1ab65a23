"""vLLM's registry of adapters as all servers of a fleet share it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from vllm.entrypoints.openai.models.protocol import BaseModelPath, LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCoreProc

from vllm_omni_plugin.errors import CoordinatorUnavailableError
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.core_client.server_state_sync import ServerStateSync
from vllm_omni_plugin.integration.core_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.integration.http.app import patch_adapter_registry
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import EngineStateUpdate
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter, adapter_of

STORY = Adapter("story", 7, "/loras/story")


class FakeFleetClient(FleetClient):
    """A client without a fleet, which records the adapters that engines would load and forget."""

    def __init__(self) -> None:
        self.server_state = ServerStateSync()
        self.added: list[LoRARequest] = []
        self.forgotten: list[int] = []

    async def forget_lora_async(self, lora_id: int) -> None:
        self.forgotten.append(lora_id)


async def server(
    client: Any, *modules: tuple[str, str], on_add: Callable[[LoRARequest], None] | None = None
) -> OpenAIServingModels:
    """The registry of one server that starts, as vLLM builds it; `on_add` is called where engines load an adapter."""
    patch_adapter_registry()

    async def add_lora(request: LoRARequest) -> bool:
        (on_add or client.added.append)(request)
        return True

    engine_client = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1),
        renderer=None,
        input_processor=None,
        engine_core=client,
        add_lora=add_lora,
    )
    models = OpenAIServingModels(
        engine_client,
        [BaseModelPath("base", "/base")],
        lora_modules=[LoRAModulePath(name=name, path=path) for name, path in modules],
    )
    await models.init_static_loras()
    return models


def update_of(
    loaded: tuple[Adapter, ...] = (), level: int | None = None, unloaded: tuple[int, ...] = ()
) -> EngineStateUpdate:
    return EngineStateUpdate(loaded, unloaded, level, Future())


async def listed(models: OpenAIServingModels) -> list[str]:
    return [card.id for card in (await models.show_available_models()).data]


@pytest.fixture
def client() -> FakeFleetClient:
    return FakeFleetClient()


async def test_adapters_loaded_before_the_server_starts_stay(client: FakeFleetClient) -> None:
    client.server_state.apply(update_of(loaded=(STORY,)))
    models = await server(client, ("story", "/other"), ("brief", "/loras/brief"))
    assert await listed(models) == ["base", "story", "brief"]
    assert [request.lora_name for request in client.added] == ["brief"]
    assert models.lora_requests["story"].lora_path == "/loras/story"


async def test_only_what_another_server_unloads_is_removed_and_the_update_is_confirmed(
    client: FakeFleetClient,
) -> None:
    client.server_state.apply(update_of(loaded=(STORY, Adapter("brief", 8, "/loras/brief"))))
    models = await server(client)
    update = update_of(unloaded=(7,))
    client.server_state.apply(update)
    assert await listed(models) == ["base", "brief"]
    assert update.applied.result(timeout=0) is None


async def test_a_module_that_another_server_loads_meanwhile_is_not_loaded_again_and_the_others_keep_their_ids(
    client: FakeFleetClient,
) -> None:
    modules = [(name, f"/loras/{name}") for name in ("first", "second", "third")]
    other = FakeFleetClient()
    await server(other, *modules)
    _, second, third = map(adapter_of, other.added)

    def other_is_faster(request: LoRARequest) -> None:
        client.added.append(request)
        if request.lora_name == "first":
            client.server_state.apply(update_of(loaded=(second,)))

    models = await server(client, *modules, on_add=other_is_faster)
    assert sorted(await listed(models)) == ["base", "first", "second", "third"]
    assert [request.lora_name for request in client.added] == ["first", "third"]
    assert client.added[1].lora_int_id == third.lora_int_id
    await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="fourth", lora_path="/loras/fourth"))
    assert len({request.lora_int_id for request in models.lora_requests.values()}) == 4


async def test_a_name_that_the_command_line_gives_twice_is_refused_as_by_vllm(client: FakeFleetClient) -> None:
    with pytest.raises(ValueError, match="'story' has already been loaded"):
        await server(client, ("story", "/loras/story"), ("story", "/other"))


@pytest.mark.parametrize("changed", [False, True], ids=["the call is refused", "the coordinator is lost during it"])
async def test_an_adapter_that_a_failed_call_leaves_in_the_document_stays_and_can_be_unloaded_later(
    client: FakeFleetClient, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    models = await server(client)
    assert await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="story", lora_path="/loras/story"))
    in_fleet = {} if changed else {name: adapter_of(request) for name, request in models.lora_requests.items()}
    monkeypatch.setattr(client, "shared_adapters", lambda: in_fleet)
    with monkeypatch.context() as patch:
        patch.setattr(client, "forget_lora_async", _coordinator_away)
        with pytest.raises(CoordinatorUnavailableError):
            await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="story"))
    assert await listed(models) == ["base", *in_fleet]
    if changed:
        return
    await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="story"))
    assert await listed(models) == ["base"]
    assert len(client.forgotten) == 1


async def test_an_adapter_that_is_unloaded_while_it_loads_is_forgotten_everywhere(client: FakeFleetClient) -> None:
    models = await server(client)
    engines_load, loads = asyncio.Event(), asyncio.Event()

    async def add_lora(request: LoRARequest) -> bool:
        loads.set()
        await engines_load.wait()
        client.added.append(request)
        return True

    models.engine_client.add_lora = add_lora
    load = asyncio.create_task(models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="story", lora_path="/story")))
    await loads.wait()
    unload = asyncio.create_task(models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="story")))
    await asyncio.sleep(0)
    engines_load.set()
    assert ["Success" in str(answer) for answer in await asyncio.gather(load, unload)] == [True, True]
    assert client.forgotten == [request.lora_int_id for request in client.added]
    assert await listed(models) == ["base"]


async def test_an_adapter_that_another_server_unloads_while_a_slow_one_still_hears_of_its_loading_is_not_listed(
    client: FakeFleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server knows it as soon as the fleet's document has it; here it is listed once all servers know it."""
    in_fleet: dict[str, Adapter] = {}
    told, all_told = asyncio.Event(), asyncio.Event()

    async def add_lora(_: UtilityCallClient, request: LoRARequest) -> bool:
        in_fleet[request.lora_name] = adapter_of(request)
        told.set()
        await all_told.wait()
        return True

    monkeypatch.setattr(UtilityCallClient, "add_lora_async", add_lora)
    monkeypatch.setattr(client, "shared_adapters", lambda: in_fleet)
    models = await server(client)
    models.engine_client.add_lora = client.add_lora_async
    load = asyncio.create_task(models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="story", lora_path="/story")))
    await told.wait()
    client.server_state.apply(update_of(unloaded=(in_fleet.pop("story").lora_int_id,)))
    all_told.set()
    assert "Success" in str(await load)
    assert await listed(models) == ["base"]
    await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="story", lora_path="/story"))
    assert await listed(models) == ["base", "story"]


async def _coordinator_away(lora_id: int) -> None:
    raise CoordinatorUnavailableError("It was lost during the call.")


async def test_servers_give_the_modules_of_the_command_line_the_same_ids_and_all_else_different_ones() -> None:
    ids: list[list[int]] = []
    for _ in range(2):
        client = FakeFleetClient()
        models = await server(client, ("story", "/loras/story"), ("brief", "/loras/brief"))
        await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="third", lora_path="/loras/third"))
        ids.append([request.lora_int_id for request in client.added])
    assert ids[0][:2] == ids[1][:2]
    assert len({*ids[0], *ids[1]}) == 4


async def test_other_files_at_the_path_of_a_module_are_another_adapter_to_an_engine_that_outlives_its_head(
    tmp_path: Path,
) -> None:
    ids = []
    for weights in (b"1", b"1", b"22"):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        client = FakeFleetClient()
        await server(client, ("story", str(tmp_path)))
        ids.append(client.added[0].lora_int_id)
    assert ids[0] == ids[1] != ids[2]


async def test_a_server_without_a_fleet_keeps_its_own_registry() -> None:
    models = await server(SimpleNamespace(added=[]), ("story", "/loras/story"))
    assert models.lora_requests["story"].lora_int_id == 1
    assert "removed" in str(await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="story")))


def test_sleep_requested_at_another_server_is_counted(client: FakeFleetClient) -> None:
    recorded: list[tuple[int, int]] = []
    client.server_state.apply(update_of(level=2))
    client.server_state.loggers = SimpleNamespace(record_sleep_state=lambda *state: recorded.append(state))
    for level in (2, None, 1, 0):
        client.server_state.apply(update_of(level=level))
    assert recorded == [(1, 2), (1, 1), (0, 0)]


async def test_a_cancelled_update_is_applied(client: FakeFleetClient) -> None:
    update = update_of(loaded=(STORY,))
    update.applied.cancel()
    client.server_state.apply(update)
    models = await server(client)
    assert await listed(models) == ["base", "story"]


def test_an_engine_reads_an_adapter_as_the_request_of_vllm_that_it_was_made_from() -> None:
    request = LoRARequest("story", 7, "/loras/story", base_model_name="base", load_inplace=True, is_3d_lora_weight=True)
    adapter = adapter_of(request)
    assert Adapter.__struct_fields__ == (*LoRARequest.__struct_fields__, "digest")
    add_lora = MethodType(EngineCoreProc.add_lora, object())
    for sent in (adapter, replace(adapter, digest="0a1b")):
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(sent))
        # As the engine core takes the arguments of a call.
        (taken,) = EngineCoreProc._convert_msgspec_args(add_lora, [plain])
        assert msgspec.structs.asdict(taken) == msgspec.structs.asdict(request)
