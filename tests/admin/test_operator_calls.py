"""`/abort_requests` reaches the requests of all servers."""

from collections.abc import Sequence

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.admin.asgi import Client
from vllm_omni_plugin.admin.operator_calls import AbortEverywhereMiddleware
from vllm_omni_plugin.errors import CoordinatorUnavailableError

PATHS = ("/abort_requests", "/inference/v1/abort_requests")


class Server:
    """vLLM's route behind the middleware.

    Attributes:
        elsewhere: ids of the calls to the other servers.
        refused: they cannot be notified.
    """

    def __init__(self, abort_all_paths: set[str], paths: Sequence[str] = PATHS) -> None:
        self.elsewhere: list[list[str]] = []
        self.refused = False
        self._main = Starlette(routes=[Route(path, PlainTextResponse(), methods=["POST"]) for path in paths])
        self._main.state.omni_abort_elsewhere = self._abort
        self._app = AbortEverywhereMiddleware(self._echo, abort_all_paths)

    def post(self, body: bytes, path: str = "/abort_requests") -> Client:
        client = Client(self._app, {"type": "http", "path": path, "method": "POST", "headers": [], "app": self._main})
        client.upload(body)
        return client

    async def _abort(self, ids: Sequence[str]) -> None:
        if self.refused:
            raise CoordinatorUnavailableError("The coordinator of the fleet cannot be reached.")
        self.elsewhere.append(list(ids))

    async def _echo(self, scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(await Request(scope, receive).body())(scope, receive, send)


ALL_PATHS = {"/abort_requests"}


@pytest.mark.parametrize(
    ("body", "path", "abort_all_paths", "elsewhere"),
    [
        (b'{"request_ids": ["a", "b"]}', "/abort_requests", ALL_PATHS, [["a", "b"]]),
        (b'{"request_ids": ["a"]}', "/inference/v1/abort_requests", ALL_PATHS, [["a"]]),
        (b'{"request_ids": "a"}', "/abort_requests", ALL_PATHS, [["a"]]),
        (b"{}", "/abort_requests", ALL_PATHS, [[]]),
        (b'{"request_ids": []}', "/abort_requests", ALL_PATHS, [[]]),
        (b'{"request_ids": []}', "/abort_requests", set(), []),
        (b'{"request_ids": []}', "/inference/v1/abort_requests", ALL_PATHS, []),
        (b'{"request_ids": [1]}', "/abort_requests", ALL_PATHS, []),
        (b"[]", "/abort_requests", ALL_PATHS, []),
        (b"{", "/abort_requests", ALL_PATHS, []),
        (b'{"request_ids": ["a"]}', "/v1/completions", ALL_PATHS, []),
    ],
)
async def test_requests_of_other_servers_are_aborted_too_and_vllm_gets_the_call_unchanged(
    body: bytes, path: str, abort_all_paths: set[str], elsewhere: list[list[str]]
) -> None:
    server = Server(abort_all_paths)
    client = server.post(body, path)
    assert await client.status() == 200
    assert client.body == body
    assert server.elsewhere == elsewhere


async def test_a_call_that_the_others_cannot_get_is_refused() -> None:
    server = Server(ALL_PATHS)
    server.refused = True
    client = server.post(b'{"request_ids": ["a"]}')
    assert await client.status() == 503
    assert client.headers["retry-after"] == "5"


@pytest.mark.parametrize("path", PATHS)
async def test_a_call_of_a_route_that_vllm_does_not_have_aborts_nothing(path: str) -> None:
    """vLLM checks no key at `/abort_requests`, and has this route with some flags only."""
    server = Server(set(), paths=[each for each in PATHS if each != path])
    client = server.post(b'{"request_ids": ["a"]}', path)
    assert await client.status() == 200
    assert server.elsewhere == []
