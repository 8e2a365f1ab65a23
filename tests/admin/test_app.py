"""Our routes and middleware in the application that vLLM builds, without an engine."""

import asyncio
import math
import warnings
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    # Importing vLLM warns, and warnings are errors here.
    warnings.simplefilter("ignore")
    from fastapi import FastAPI
    from fastapi.routing import APIRoute
    from vllm import plugins
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.app import build_app
    from vllm.exceptions import GracefulHTTPError
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser

from tests.admin.asgi import CHANGES, client_of
from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admin import hold
from vllm_omni_plugin.admin.http_admission import HttpAdmission
from vllm_omni_plugin.admin.operator_actions import FleetAdmin
from vllm_omni_plugin.admin.operator_calls import OPERATOR_PATHS
from vllm_omni_plugin.admin.replica_header import new_chosen_replicas
from vllm_omni_plugin.admission import RequestTerms
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.config import FLAGS
from vllm_omni_plugin.errors import (
    CoordinatorUnavailableError,
    NoReplicaError,
    OmniError,
    RanksUnknownError,
    RequestRefusedError,
)
from vllm_omni_plugin.integration.core_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.integration.http.app import INFERENCE_PATHS, FleetEndpoints, patch_app
from vllm_omni_plugin.integration.options.additional_config import LOCAL_ADMIN_KEY
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.pool.worker_ranks import WorkerRanks
from vllm_omni_plugin.vllm_api.versions.differences import DECISIONS_ROUTE

NEED_NO_ENGINE = {
    "/detokenize",
    "/inference/v1/abort_requests",
    "/is_scaling_elastic_ep",
    "/ping",
    "/scale_elastic_ep",
    "/tokenize",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/responses/{response_id}/cancel",
}
"""POST routes of vLLM that need no replica."""

LEAVE_NOTHING = {"/abort_requests", "/weight_checker"}
"""Operator routes that may be called without a coordinator, or refuse the call themselves then."""

BuildApp = Callable[..., FastAPI]
EVERYTHING = ("generate", "transcription", "realtime", "embed", "classify")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> BuildApp:
    """Builds vLLM's application with our plugin."""
    monkeypatch.setattr(plugins, "load_endpoint_plugins", plugins.load_endpoint_plugins)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    patch_app()

    def build(*arguments: str, admin_key_file: Path | None = None) -> FastAPI:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
        setattr(args, ADMIN_KEY_FILE, admin_key_file and str(admin_key_file))
        args.omni_admin_loopback = False
        setattr(args, LOCAL_ADMIN_KEY, ADMIN_KEYS[0])
        app: FastAPI = build_app(args, EVERYTHING, SimpleNamespace(get_pooling_task=lambda _: "embed"))
        return app

    return build


def give_fleet(app: FastAPI, fleet: FakeFleet, replica_wait: float = 0.01) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    app.state.omni_fleet = FleetAdmin(fleet.orchestrator, fleet.fleet_calls, lambda: fleet.now)
    app.state.omni_hold = hold.Hold(fleet.orchestrator, never, replica_wait, lambda: "", never)


def test_the_class_satisfies_vllms_plugin_interface() -> None:
    assert isinstance(FleetEndpoints(), EndpointPlugin)


def test_patching_twice_adds_the_plugin_once(build: BuildApp) -> None:
    patch_app()
    assert [plugin.name for plugin in build().state.endpoint_plugins] == ["omni"]


async def test_a_server_that_has_not_loaded_our_part_does_not_start(
    build: BuildApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[FastAPI] = []
    monkeypatch.setattr(entry, "serve_http", served.append)
    patch_app()
    app = build()
    for unpatched in (FastAPI(), app):
        with pytest.raises(OmniError, match="has not loaded the routes and middleware of vllm-omni-plugin"):
            entry.serve_http(unpatched)
    async with FakeFleet() as fleet:
        give_fleet(app, fleet)
        entry.serve_http(app)
    assert served == [app]


def test_every_operator_route_of_vllm_may_be_refused(build: BuildApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    paths = {route.path for route in build().routes if isinstance(route, APIRoute) and "POST" in route.methods}
    vllms = {path for path in paths if not path.startswith("/omni/")} - INFERENCE_PATHS - NEED_NO_ENGINE
    assert vllms - OPERATOR_PATHS == LEAVE_NOTHING
    # These routes also need a profiler or runtime loading of adapters.
    more = {"/start_profile", "/stop_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters"}
    assert OPERATOR_PATHS - vllms <= more


async def test_an_operators_call_is_refused_without_a_coordinator(
    build: BuildApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    app = build()
    fleet = FakeFleet()
    fleet.fleet_calls = FleetCalls(fleet.orchestrator, "head", lambda: None)
    async with fleet, client_of(app) as client:
        give_fleet(app, fleet)
        answer = await client.post("/sleep")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "coordinator" in answer.json()["error"]["message"]
        assert (await client.post("/tokenize")).status_code != 503


UNSERVED_CALLS = (("POST", "/pause"), ("POST", "/sleep"), ("GET", "/is_paused"), ("GET", "/is_sleeping"))


@pytest.mark.parametrize(("method", "path"), UNSERVED_CALLS)
@pytest.mark.parametrize("lost", [False, True])
async def test_an_operators_call_that_nobody_takes_or_that_loses_the_coordinator_is_a_503_with_the_reason(
    build: BuildApp, monkeypatch: pytest.MonkeyPatch, method: str, path: str, lost: bool
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    app, fleet = build(), FakeFleet(replicas=0)
    calls = UtilityCallClient(fleet.orchestrator, FleetStages(None, [None]), WorkerRanks((), {}, {}, is_open=False))

    async def lose(*_: object) -> None:
        raise CoordinatorUnavailableError("The coordinator was lost. Please repeat the call.")

    if lost:
        monkeypatch.setattr(FleetCalls, "call", lose)
    app.state.engine_client = SimpleNamespace(
        pause_generation=lambda mode, clear_cache: calls.pause_scheduler_async(mode, clear_cache),
        sleep=calls.sleep_async,
        is_paused=calls.is_scheduler_paused_async,
        is_sleeping=calls.is_sleeping_async,
    )
    async with fleet, client_of(app) as client:
        give_fleet(app, fleet)
        answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    reason = "Please repeat the call." if lost else "Please try again later."
    assert answer.json()["error"]["message"].endswith(reason)


@pytest.mark.parametrize(
    ("query", "expected"), [("", 6), ("?include_dp=true", 6), ("?include_dp=false", 2), ("?include_dp=0", 2)]
)
async def test_the_world_size_counts_all_replicas(
    query: str, expected: int, build: BuildApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = with_parallel_config(build, monkeypatch)
    app.state.omni_count_workers = lambda: 6
    async with client_of(app) as client:
        answer = await client.get(f"/get_world_size{query}")
    assert (answer.status_code, answer.json()) == (200, {"world_size": expected})


async def test_an_unknown_world_size_is_an_error_with_the_reason(
    build: BuildApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise RanksUnknownError("Nobody knows.")

    app = with_parallel_config(build, monkeypatch)
    app.state.omni_count_workers = refuse
    async with client_of(app) as client:
        answer = await client.get("/get_world_size")
    assert (answer.status_code, answer.json()["error"]["message"]) == (409, "Nobody knows.")


def with_parallel_config(build: BuildApp, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """A server with the routes of vLLM's development mode; each of its engines has two workers."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    app = build()
    parallel = SimpleNamespace(world_size=2, world_size_across_dp=2)
    app.state.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    return app


def test_every_post_route_of_vllm_is_classified(build: BuildApp) -> None:
    routes = build().routes
    paths = {route.path for route in routes if isinstance(route, APIRoute) and "POST" in route.methods}
    vllms = {path for path in paths if not path.startswith("/omni/")}
    assert vllms - INFERENCE_PATHS == NEED_NO_ENGINE
    # These need optional packages, a pipeline with audio output, or a later vLLM.
    later = set() if DECISIONS_ROUTE.applies else {"/v1/decisions"}
    assert INFERENCE_PATHS - vllms <= {"/cohere/v2/chat", "/v1/audio/speech"} | later


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("", 401),
        ("Bearer wrong", 401),
        ("right", 401),
        ("Basic right", 401),
        ("Bearer right", 200),
        ("bearer 2nd", 200),
    ],
)
async def test_the_servers_api_keys_guard_our_routes(build: BuildApp, authorization: str, status: int) -> None:
    app = build("--api-key", "right", "2nd")
    give_fleet(app, FakeFleet())
    async with client_of(app, Authorization=authorization) as client:
        answer = await client.get("/omni/replicas")
    assert answer.status_code == status


async def test_a_root_path_does_not_bypass_the_key(build: BuildApp) -> None:
    app = build("--api-key", "right", "--root-path", "/o")
    give_fleet(app, FakeFleet())
    async with client_of(app) as client:
        answers = [await client.get(path) for path in ("/omni/replicas", "/o/omni/replicas")]
    assert [answer.status_code for answer in answers] == [401, 401]


(ADMIN_KEY_FILE,) = (flag.destination for flag in FLAGS if flag.name == "--omni-admin-key-file")
"""The flag's name in the parsed arguments."""
ADMIN_KEYS = ("admin-key-number-1", "admin-key-number-2")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("\n".join(ADMIN_KEYS))
    return path


@pytest.mark.parametrize(("method", "path"), CHANGES)
async def test_with_admin_keys_an_api_key_may_not_change_the_fleet(
    build: BuildApp, key_file: Path, method: str, path: str
) -> None:
    app = build("--api-key", "right", admin_key_file=key_file)
    async with client_of(app) as client:
        for key in ("right", "wrong", ADMIN_KEYS[0].upper(), " ".join(ADMIN_KEYS)):
            refused = await client.request(method, path, headers={"Authorization": f"Bearer {key}"})
            assert refused.status_code == 401
            assert "--omni-admin-key-file" in refused.json()["error"]["message"]
        for key in ADMIN_KEYS:
            # There is no fleet to change.
            taken = await client.request(method, path, headers={"Authorization": f"Bearer {key}"}, json={"prompt": "x"})
            assert taken.status_code == 404


@pytest.mark.parametrize(("arguments", "status"), [((), 403), (("--api-key", "right"), 401)])
async def test_without_a_key_file_the_servers_own_key_allows_changes(
    build: BuildApp, arguments: tuple[str, ...], status: int
) -> None:
    app = build(*arguments)
    async with FakeFleet() as fleet, client_of(app) as client:
        give_fleet(app, fleet)
        assert (await client.post("/omni/replicas/0.0/drain")).status_code == status
        client.headers["Authorization"] = f"Bearer {ADMIN_KEYS[0]}"
        assert (await client.post("/omni/replicas/0.0/drain")).status_code == 204


async def test_errors_of_our_routes_are_formatted_like_openais(build: BuildApp) -> None:
    app = build()
    give_fleet(app, FakeFleet(replicas=1))
    async with client_of(app, Authorization=f"Bearer {ADMIN_KEYS[0]}") as client:
        answer = await client.post("/omni/replicas/9/drain")
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "There is no replica 9. There are: 0.0.",
        "type": "Not Found",
        "param": None,
        "code": 404,
    }


async def test_a_503_of_our_routes_has_retry_after_although_vllm_drops_the_headers_of_errors(build: BuildApp) -> None:
    async def explain(**_: Any) -> None:
        raise NoReplicaError("No replica can serve.")

    app, fleet = build(), FakeFleet()
    fleet.fleet_calls = FleetCalls(fleet.orchestrator, "head", lambda: None)
    fleet.pool.member(0).remote = True
    app.state.omni_explain = explain
    async with fleet, client_of(app, Authorization=f"Bearer {ADMIN_KEYS[0]}") as client:
        give_fleet(app, fleet)
        for path, body in (("/omni/replicas/0.0/drain", None), ("/omni/explain", {"prompt": "x"})):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5")


async def test_a_request_that_cannot_be_served_is_refused_after_its_key_was_checked(build: BuildApp) -> None:
    app = build("--api-key", "right")
    give_fleet(app, FakeFleet(replicas=0))
    async with client_of(app) as client:
        stranger = await client.post("/v1/completions", json={})
        known = await client.post("/v1/completions", json={}, headers={"Authorization": "Bearer right"})
    assert (stranger.status_code, known.status_code) == (401, 503)
    assert int(known.headers["Retry-After"]) > 0


UNGUARDED = ("/classify", "/generative_scoring", "/invocations", "/pooling", "/rerank", "/score")
"""Paths whose keys vLLM does not check."""


@pytest.mark.parametrize("path", UNGUARDED)
async def test_requests_without_a_key_take_no_place_in_the_hold(
    build: BuildApp, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(hold, "MAX_WAITING", 1)
    app = build("--api-key", "right")
    fleet = FakeFleet(replicas=0)
    give_fleet(app, fleet, replica_wait=600.0)
    async with client_of(app) as client:
        strangers = [asyncio.create_task(client.post(path, json={})) for _ in range(3)]
        assert [answer.status_code for answer in await asyncio.gather(*strangers)] == [503] * 3
        known = asyncio.create_task(client.post("/v1/completions", json={}, headers={"Authorization": "Bearer right"}))
        await eventually(lambda: fleet.orchestrator.metrics.held_before_accept == 1, "the waiting of who has a key")
        known.cancel()


@pytest.mark.parametrize("path", UNGUARDED)
async def test_requests_without_a_key_are_of_no_tenant(build: BuildApp, path: str) -> None:
    app, tenants = build("--api-key", "right"), []

    def refuse(terms: RequestTerms, *_: object) -> RequestRefusedError:
        tenants.append((terms.tenant, terms.anonymous))
        return RequestRefusedError(HTTPStatus.TOO_MANY_REQUESTS, "in_flight", "It has enough.", 1)

    async with FakeFleet() as fleet, client_of(app) as client:
        give_fleet(app, fleet)
        app.state.omni_admission = HttpAdmission(
            refuse, lambda _: True, lambda _: None, ["X-Tenant-ID"], lambda: 0.0, lambda _: math.inf
        )
        for key in ("right", "wrong"):
            headers = {"X-Tenant-ID": "acme", "Authorization": f"Bearer {key}"}
            assert (await client.post(path, json={}, headers=headers)).status_code == 429
    assert set(tenants) == {("acme", False), ("", True)}


async def test_answers_name_their_replica_also_for_errors(build: BuildApp) -> None:
    app = build()

    @app.post("/v1/moved")
    async def moved() -> None:
        chosen_replicas = new_chosen_replicas()
        assert chosen_replicas is not None
        chosen_replicas.append(("0.1", Decision(0, "least-load")))
        raise GracefulHTTPError("Replica 1 was lost.", HTTPStatus.INTERNAL_SERVER_ERROR)

    async with client_of(app) as client:
        failed = await client.post("/v1/moved")
        other = await client.get("/version")
    assert (failed.status_code, failed.headers["X-Omni-Replica"]) == (500, "0.1")
    assert failed.json()["error"]["message"] == "Replica 1 was lost."
    assert "X-Omni-Replica" not in other.headers


async def test_a_server_without_a_fleet_answers_like_vllm(build: BuildApp) -> None:
    app = build()
    await FleetEndpoints().init_state(SimpleNamespace(engine_core=object()), app.state, None)
    async with client_of(app) as client:
        assert (await client.get("/omni/replicas")).status_code == 404
        assert (await client.post("/v1/completions", json={})).status_code == 400
