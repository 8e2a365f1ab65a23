"""Adds our routes and middleware to the FastAPI app of vLLM's server, as one of vLLM's endpoint plugins.

vLLM loads endpoint plugins that an environment variable names. Ours needs none, because our flags enable it.
"""

import asyncio
import os
import signal
import time
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware

from vllm_omni_plugin.admin.admin_keys import publish_local_key
from vllm_omni_plugin.admin.hold import Hold, HoldMiddleware
from vllm_omni_plugin.admin.http_admission import AdmissionMiddleware, HttpAdmission, tenant_headers
from vllm_omni_plugin.admin.operator_actions import DRAINING
from vllm_omni_plugin.admin.operator_calls import AbortEverywhereMiddleware, OperatorCallMiddleware, WorldSizeMiddleware
from vllm_omni_plugin.admin.replica_header import ReplicaHeaderMiddleware
from vllm_omni_plugin.admin.routes import build_router
from vllm_omni_plugin.admin.watch.watch_routes import build_watch_router
from vllm_omni_plugin.errors import SHUTTING_DOWN, OmniError, RequestRefusedError
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.core_client.pipeline_calls import Abort
from vllm_omni_plugin.integration.core_client.server_state_sync import AdapterIdCounter
from vllm_omni_plugin.integration.http.operator_state import (
    has_api_key,
    make_access,
    set_operator_state,
    warn_of_open_access,
)
from vllm_omni_plugin.integration.options.additional_config import LOCAL_ADMIN_KEY, SHARED_DRAIN_FLAG, options_of
from vllm_omni_plugin.integration.patching import patch_function
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.requests.counters import count_reason
from vllm_omni_plugin.pipeline import Modality, Pipeline
from vllm_omni_plugin.vllm_api.engine_messages.adapter import adapter_digest

logger = init_logger(__name__)


_MIDDLEWARE = (
    AdmissionMiddleware,
    HoldMiddleware,
    ReplicaHeaderMiddleware,
    OperatorCallMiddleware,
    AbortEverywhereMiddleware,
)
INFERENCE_PATHS = frozenset(
    {
        "/classify",
        "/cohere/v2/chat",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/decisions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v1/systemone",
        "/v2/embed",
        "/v2/rerank",
    }
)
"""The routes whose requests need an engine. They wait here while no replica serves. Utility calls are not among them,
since an operator wants an error at once. Requests of a route that is missing here wait in the orchestrator instead, and
a stream then gets its refusal as an event."""


def patch_app() -> None:
    """Make vLLM's server use our routes, middleware, session ids and adapter registry, or not start. Idempotent."""
    from vllm import plugins
    from vllm.entrypoints.launchers.api_server import entry

    patch_function(plugins, "load_endpoint_plugins", _load_endpoint_plugins)
    patch_function(entry, "serve_http", _serve_http)
    patch_session_id()
    patch_adapter_registry()


def _load_endpoint_plugins(original: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return [*original(*args, **kwargs), FleetEndpoints()]


def _serve_http(original: Any, app: FastAPI, *args: Any, **kwargs: Any) -> Any:
    """Refuse to serve if vLLM did not load our routes and middleware."""
    attached = {middleware.cls for middleware in app.user_middleware}
    if not attached.issuperset(_MIDDLEWARE) or not hasattr(app.state, "omni_fleet"):
        raise OmniError(
            f"The HTTP server of vLLM {version('vllm')} has not loaded the routes and middleware of vllm-omni-plugin "
            f"{version('vllm-omni-plugin')}: without them it would not check admission. Install versions that support "
            "each other."
        )
    return original(app, *args, **kwargs)


def patch_session_id() -> None:
    """Make vLLM's server use OpenAI's `user` as the session id of a request that has none. Idempotent."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    def session_or_user(original: Any, request: Any, raw_request: Any) -> str | None:
        return original(request, raw_request) or getattr(request, "user", None) or None

    patch_function(GenerateBaseServing, "_get_session_id", session_or_user)


class FleetEndpoints:
    """Implements vLLM's `EndpointPlugin`."""

    name = "omni"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add routes and middleware. vLLM calls this before it adds its own middleware."""
        from vllm import envs

        self._app = app
        args = app.state.args
        has_key = has_api_key(args)
        access = make_access(args, has_key, partial(_local_key, args), unix_socket=bool(args.uds))
        app.include_router(build_router(access))
        app.include_router(build_watch_router(access))
        # Innermost, so that vLLM checks API keys first, and its HTTP metrics include the waiting time.
        app.user_middleware.append(Middleware(AdmissionMiddleware, paths=INFERENCE_PATHS, has_key=has_key))
        app.user_middleware.append(Middleware(HoldMiddleware, paths=INFERENCE_PATHS, has_key=has_key))
        app.user_middleware.append(Middleware(ReplicaHeaderMiddleware))
        app.user_middleware.append(Middleware(OperatorCallMiddleware))
        # Without ids, only the route of the development mode aborts all requests.
        abort_all_paths = {"/abort_requests"} if envs.VLLM_SERVER_DEV_MODE else ()
        app.user_middleware.append(Middleware(AbortEverywhereMiddleware, abort_all_paths=abort_all_paths))
        if envs.VLLM_SERVER_DEV_MODE:
            app.user_middleware.append(Middleware(WorldSizeMiddleware))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        fleet = getattr(engine_client, "engine_core", None)
        if not isinstance(fleet, FleetClient):
            return
        options = options_of(engine_client.vllm_config)
        assert options is not None
        warn_of_open_access(options)
        from vllm_omni_plugin.integration.http.completion_prompts import read_prompt

        one_of_several = hasattr(args, SHARED_DRAIN_FLAG)
        set_operator_state(
            state,
            fleet,
            options,
            fleet.head_drain,
            read_prompt=partial(read_prompt, state),
            is_ending=lambda: fleet.graceful_shutdown.ending,
            is_over=lambda: fleet.resources.engine_dead,
            # The supervisor sends the signal to all of its API servers.
            reload_others=partial(os.kill, os.getppid(), signal.SIGHUP) if one_of_several else lambda: None,
        )
        # One of several API servers gets the terminal's signal and the supervisor's for the same Ctrl-C, so it ignores
        # the second. On a second Ctrl-C the supervisor kills it.
        if (flag := getattr(args, SHARED_DRAIN_FLAG, None)) is not None:
            fleet.head_drain.use_shared_flag(flag)
        else:
            # asyncio keeps only a weak reference to a task.
            state.omni_second_signal = asyncio.create_task(
                _handle_second_signal(fleet, self._app), name="omni-second-signal"
            )
        state.omni_abort_elsewhere = fleet.abort_elsewhere
        state.omni_count_workers = fleet.worker_ranks.count
        headers = tenant_headers(options.tenant_header, options.admission)
        if headers:
            admission = fleet.orchestrator.admission
            assert admission is not None
            count = partial(_count_refusal, fleet)
            state.omni_admission = HttpAdmission(
                admission.expected_refusal,
                admission.may_refuse,
                count,
                headers,
                time.monotonic,
                admission.longest_wait_s,
            )
        state.omni_hold = Hold(
            fleet.orchestrator,
            fleet.until_serving,
            options.replica_wait,
            partial(_why_closed, fleet),
            fleet.graceful_shutdown.wait_until_ending,
            options.max_buffered_bytes,
        )
        if fleet.stages.pipeline is not None:
            serve_pipeline(self._app, fleet.stages.pipeline, fleet.abort_requests)


def serve_pipeline(app: FastAPI, pipeline: Pipeline, abort: Abort) -> None:
    """Wrap vLLM's handlers of chat and completions, and add the speech route if the pipeline has audio output."""
    from vllm_omni_plugin.integration.http.pipeline_handler import PipelineHandler
    from vllm_omni_plugin.integration.http.pipeline_speech import SpeechHandler, build_speech_router

    chat, completion = app.state.openai_serving_chat, app.state.openai_serving_completion
    if completion is not None:
        create = completion.create_completion
        if Modality.AUDIO in pipeline.modalities:
            app.include_router(build_speech_router(SpeechHandler(completion, create, pipeline, abort)))
        completion.create_completion = PipelineHandler(completion, create, pipeline, abort, chat=False).handle
    if chat is not None:
        create = chat.create_chat_completion
        chat.create_chat_completion = PipelineHandler(chat, create, pipeline, abort, chat=True).handle


def _count_refusal(fleet: FleetClient, refusal: RequestRefusedError) -> None:
    orchestrator = fleet.orchestrator
    key = (orchestrator.entry_pool.stage_id, str(refusal.reason), str(int(refusal.status)))
    count_reason(orchestrator.metrics.requests_refused_before_accept, key)


def _why_closed(fleet: FleetClient) -> str:
    """Why new requests are refused; empty if they are not."""
    if fleet.graceful_shutdown.ending:
        return SHUTTING_DOWN
    return DRAINING if fleet.head_drain.active else ""


async def _handle_second_signal(fleet: FleetClient, app: FastAPI) -> None:
    await fleet.graceful_shutdown.wait_until_ending()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, _cancel_wait, fleet, app)
    logger.info("Shutting down: requests in flight may finish; a second signal aborts them.")


def _cancel_wait(fleet: FleetClient, app: FastAPI) -> None:
    fleet.cancel_wait()
    server: Any = getattr(app.state, "server", None)
    if server is not None and hasattr(server, "force_exit"):
        server.force_exit = True


def _local_key(args: Any) -> str | None:
    """A server with a port has a key of its own. Several API servers share that of their supervisor."""
    return getattr(args, LOCAL_ADMIN_KEY, None) or (None if args.uds else publish_local_key(args.host, args.port))


def patch_adapter_registry() -> None:
    """Make vLLM's adapter registry the same in all servers of the fleet. Idempotent."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    patch_function(OpenAIServingModels, "init_static_loras", _init_static_loras)
    patch_function(OpenAIServingModels, "unload_lora_adapter", _unload_adapter)


async def _init_static_loras(original: Any, models: Any) -> None:
    """Load the adapters of the command line that no other head has loaded yet."""
    fleet = _fleet_of(models)
    if fleet is None:
        await original(models)
        return
    fleet.server_state.bind(models)
    for module in fleet.server_state.missing(models.static_lora_modules or ()):
        models.static_lora_modules = [module]
        digest = await asyncio.to_thread(adapter_digest, module.path)
        models.lora_id_counter = AdapterIdCounter([(module.name, module.path, digest)])
        await original(models)


async def _unload_adapter(original: Any, models: Any, request: Any) -> Any:
    """Unload an adapter in the whole fleet; after an error this head keeps it if the fleet's document does."""
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    # It may be loading, for which vLLM waits, too.
    async with models.lora_resolver_lock[request.lora_name]:
        unloaded = models.lora_requests.get(request.lora_name)
    answer = await original(models, request)
    fleet = _fleet_of(models)
    if fleet is not None and unloaded is not None and not isinstance(answer, ErrorResponse):
        try:
            await fleet.forget_lora_async(unloaded.lora_int_id)
        except Exception:
            # A call whose coordinator is lost meanwhile may have changed the document, which all heads then follow.
            shared = fleet.shared_adapters().get(request.lora_name)
            if shared is not None and shared.lora_int_id == unloaded.lora_int_id:
                models.lora_requests.setdefault(request.lora_name, unloaded)
            raise
    return answer


def _fleet_of(models: Any) -> FleetClient | None:
    client = getattr(models.engine_client, "engine_core", None)
    return client if isinstance(client, FleetClient) else None
