"""vLLM routes for its operators, where one server must answer for the whole fleet."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import ContextVar
from http import HTTPStatus

import msgspec
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_plugin.admin.hold import BufferedRequest, error_response, is_request, refusal_response
from vllm_omni_plugin.admin.operator_actions import FleetAdmin
from vllm_omni_plugin.errors import OmniError, RanksUnknownError

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

AbortElsewhere = Callable[[Sequence[str]], Awaitable[None]]
"""Aborts requests of the other servers by their clients' ids; without ids, all."""

_ABORT_PATHS = frozenset({"/abort_requests", "/inference/v1/abort_requests"})


_QUESTION_PATHS = frozenset({"/is_paused", "/is_sleeping", "/weight_checker", "/weight_info"})

_refusals: ContextVar[list[OmniError] | None] = ContextVar("omni_refusals", default=None)


def note_refusal(error: OmniError) -> None:
    """A call to the engines that the running HTTP request makes is refused for now, so that it gets a 503."""
    if (refusals := _refusals.get()) is not None:
        refusals.append(error)


class OperatorCallMiddleware:
    """Answers an operator's call that is refused for now with 503, the reason and `Retry-After`.

    That is each POST to one of `OPERATOR_PATHS` while `omni_fleet` has a `refusal`, and any call that `note_refusal`
    was told of.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """503 for an operators' call while other heads cannot be told of it, or if the fleet refuses it."""
        error: OmniError | None = None
        if is_request("POST", OPERATOR_PATHS, scope):
            fleet: FleetAdmin | None = getattr(scope["app"].state, "omni_fleet", None)
            error = (fleet and fleet.refusal) or await self._make_call(scope, receive, send)
        elif is_request("GET", _QUESTION_PATHS, scope) or is_request("POST", _QUESTION_PATHS, scope):
            error = await self._make_call(scope, receive, send)
        else:
            await self._app(scope, receive, send)
        if error is not None:
            await refusal_response(error)(scope, receive, send)

    async def _make_call(self, scope: Scope, receive: Receive, send: Send) -> OmniError | None:
        """Let vLLM make the call. If it is refused, return the error, and drop vLLM's answer."""
        refusals: list[OmniError] = []

        async def forward(message: Message) -> None:
            if not refusals:
                await send(message)

        token = _refusals.set(refusals)
        try:
            await self._app(scope, receive, forward)
        except OmniError:
            if not refusals:
                raise
        finally:
            _refusals.reset(token)
        return next(iter(refusals), None)


class AbortEverywhereMiddleware:
    """Aborts the requests of other servers by `app.state.omni_abort_elsewhere`, then lets vLLM abort its own.

    If the other servers cannot be notified, the answer is a 503 with `Retry-After`, and vLLM does not see the call. A
    call without ids aborts all requests at `abort_all_paths` only. A call of a route that vLLM does not have does
    nothing: vLLM checks no key at `/abort_requests`, and has it with some flags only.
    """

    def __init__(self, app: ASGIApp, abort_all_paths: Collection[str]) -> None:
        self._app = app
        self._abort_all_paths = abort_all_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Abort the ids at the other heads first; if that fails, this head aborts nothing either."""
        abort: AbortElsewhere | None = (
            getattr(scope["app"].state, "omni_abort_elsewhere", None)
            if is_request("POST", _ABORT_PATHS, scope) and _has_route(scope)
            else None
        )
        if abort is None:
            await self._app(scope, receive, send)
            return
        request = BufferedRequest(receive)
        ids = _request_ids(await request.body() or b"")
        if ids or (ids == () and is_request("POST", self._abort_all_paths, scope)):
            try:
                await abort(ids)
            except OmniError as error:
                await refusal_response(error)(scope, request.receive, send)
                return
        await self._app(scope, request.receive, send)


def _has_route(scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


class _Body(msgspec.Struct):
    request_ids: tuple[str, ...] | str | None = None


def _request_ids(body: bytes) -> tuple[str, ...] | None:
    """The ids in a body; () if it has none, None if it cannot be decoded, which vLLM reports."""
    try:
        ids = msgspec.json.decode(body, type=_Body).request_ids
    except (msgspec.DecodeError, RecursionError):
        return None
    return (ids,) if isinstance(ids, str) else ids or ()


PATH = "/get_world_size"
_FALSE = frozenset({"false", "0", "no", "off", "f", "n"})
"""As FastAPI reads a flag."""


class WorldSizeMiddleware:
    """Answers with the number of workers from the state's `omni_count_workers`, or with 409 and the reason.

    Asked without data parallelism (`include_dp=false`), vLLM answers. For servers in vLLM's development mode: others
    have no such route.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `/get_world_size` with the workers of all replicas, unless only those of one are wanted."""
        count: Callable[[], int] | None = None
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) == PATH:
            asked = QueryParams(scope["query_string"]).get("include_dp", "true").lower()
            count = None if asked in _FALSE else getattr(scope["app"].state, "omni_count_workers", None)
        await (self._app if count is None else _world_size(count))(scope, receive, send)


def _world_size(count: Callable[[], int]) -> Response:
    try:
        return JSONResponse({"world_size": count()})
    except RanksUnknownError as error:
        return error_response(str(error), HTTPStatus.CONFLICT, HTTPStatus.CONFLICT.phrase)
