"""Our routes and middleware in the FastAPI app of vLLM's server.

They come as one of vLLM's endpoint plugins, whose interface is documented; only its gate is ours: vLLM loads such
plugins when the environment names them, while our flags on the command line are consent enough.
"""

import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from starlette.middleware import Middleware

from vllm_omni_plugin.admin.explain import Explainer
from vllm_omni_plugin.admin.fleet import FleetAdmin
from vllm_omni_plugin.admin.hold import HoldMiddleware
from vllm_omni_plugin.admin.receipt import ReceiptMiddleware
from vllm_omni_plugin.admin.routes import build_router
from vllm_omni_plugin.admin.waiting_room import WaitingRoom
from vllm_omni_plugin.integration.adapters import open_adapters
from vllm_omni_plugin.integration.client import FleetClient
from vllm_omni_plugin.integration.options import options_of

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
"""What needs an engine to be answered. Tokenizing, rendering, cancelling and counting do not; calls to the engine as a
whole are an operator's, who wants to know at once. A path of a later vLLM that is missing here is held by the
orchestrator alone: no less, but a stream then learns of a refusal by an event."""

_OPEN = "_vllm_omni_plugin_app"


def open_app() -> None:
    """Make vLLM's server take our routes, middleware and names of adapters from now on. Idempotent."""
    from vllm import plugins

    own_load = plugins.load_endpoint_plugins
    if hasattr(own_load, _OPEN):
        return

    @wraps(own_load)
    def load_endpoint_plugins(*args: Any, **kwargs: Any) -> list[Any]:
        return [*own_load(*args, **kwargs), FleetEndpoints()]

    setattr(load_endpoint_plugins, _OPEN, True)
    plugins.load_endpoint_plugins = load_endpoint_plugins
    open_adapters()


class FleetEndpoints:
    """Satisfies vLLM's `EndpointPlugin`."""

    name = "omni"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add routes and middleware. vLLM calls it before it adds its own middleware for all routes."""
        self._app = app
        app.include_router(build_router(_api_key_guard(app)))
        # Innermost, so that only requests with a valid key wait, and the wait counts in vLLM's HTTP metrics.
        app.user_middleware.append(Middleware(HoldMiddleware, paths=INFERENCE_PATHS))
        app.user_middleware.append(Middleware(ReceiptMiddleware))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Tell routes and middleware which fleet they stand before, if the server has one."""
        fleet = getattr(engine_client, "engine_core", None)
        if not isinstance(fleet, FleetClient):
            return
        options = options_of(engine_client.vllm_config)
        assert options is not None
        from vllm_omni_plugin.integration.pipeline_http import serve_pipeline
        from vllm_omni_plugin.integration.prompts import CompletionPrompts

        state.omni_explainer = Explainer(fleet.orchestrator, CompletionPrompts(state), fleet.stages.prompt_stage)
        state.omni_fleet = FleetAdmin(fleet.orchestrator, time.monotonic)
        state.omni_waiting_room = WaitingRoom(
            fleet.orchestrator, fleet.until_serving, options.replica_wait, fleet.last_requests
        )
        if fleet.stages.pipeline is not None:
            serve_pipeline(self._app, fleet.stages.pipeline, fleet.abort_call)


def _api_key_guard(app: FastAPI) -> Callable[[Request], Awaitable[None]]:
    """What lets a request to our routes pass: vLLM's own check of its keys, if it has any.

    Its middleware checks only paths that begin with one of its prefixes, which ours do not.
    """
    from vllm import envs
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    tokens = [key for key in (app.state.args.api_key or [envs.VLLM_API_KEY]) if key]
    authentication = AuthenticationMiddleware(app, tokens)

    async def guard(request: Request) -> None:
        if tokens and not authentication.verify_token(request.headers):
            raise HTTPException(401, "Unauthorized: these routes need the server's API key as a bearer token.")

    return guard
