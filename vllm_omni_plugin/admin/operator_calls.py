"""Refuses calls to the engines as a whole while they cannot be sent to all heads of the fleet."""

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_omni_plugin.admin.hold import is_request, refusal_response
from vllm_omni_plugin.admin.replica_admin import FleetAdmin

OPERATOR_PATHS = frozenset(
    {
        "/adapters",
        "/collective_rpc",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/pause",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_profile",
        "/start_weight_update",
        "/stop_profile",
        "/update_weight_version",
        "/update_weights",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/wake_up",
    }
)
"""vLLM's routes that call engines as a whole. Their handlers turn every error into a status of their own, so a
middleware is needed."""


class OperatorCallMiddleware:
    """Answers a POST to one of `OPERATOR_PATHS` with 503 and `Retry-After` if `omni_fleet` has a `refusal`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if is_request("POST", OPERATOR_PATHS, scope):
            fleet: FleetAdmin | None = getattr(scope["app"].state, "omni_fleet", None)
            error = None if fleet is None else fleet.refusal
        await (self._app if error is None else refusal_response(error))(scope, receive, send)
