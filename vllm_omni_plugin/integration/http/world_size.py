"""Answers vLLM's `/get_world_size` for all replicas, since vLLM's configuration knows one."""

from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_omni_plugin.admin.hold import error_response
from vllm_omni_plugin.errors import RanksUnknownError

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
        count: Callable[[], int] | None = None
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) == PATH:
            asked = QueryParams(scope["query_string"]).get("include_dp", "true").lower()
            count = None if asked in _FALSE else getattr(scope["app"].state, "omni_count_workers", None)
        await (self._app if count is None else _answer(count))(scope, receive, send)


def _answer(count: Callable[[], int]) -> Response:
    try:
        return JSONResponse({"world_size": count()})
    except RanksUnknownError as error:
        return error_response(str(error), HTTPStatus.CONFLICT, HTTPStatus.CONFLICT.phrase)
