"""Requests that come while no replica serves are held, or refused before the response starts."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admin import hold
from vllm_omni_plugin.admin.hold import CLIENT_CLOSED_REQUEST, LONGEST_HOLD, RETRY_AFTER_S, Hold, HoldMiddleware
from vllm_omni_plugin.errors import SHUTTING_DOWN

from .asgi import Client

PATHS = frozenset({"/v1/completions", "/pooling"})
LONG = 600.0


async def echo(request: Request) -> Response:
    return PlainTextResponse(await request.body())


async def unavailable(_: Request) -> Response:
    return PlainTextResponse("later", 503)


async def own_retry_after(_: Request) -> Response:
    return PlainTextResponse("later", 503, {"retry-after": "77"})


def any_key(_: Headers) -> bool:
    return True


class Server:
    """An application behind the middleware, and a fleet whose only replica does not serve yet."""

    def __init__(
        self,
        replica_wait: float = LONG,
        answer: Callable[[Request], Awaitable[Response]] = echo,
        has_key: Callable[[Headers], bool] = any_key,
        max_bytes: int = 1 << 26,
    ) -> None:
        self.fleet = FakeFleet(replicas=0)
        self.metrics = self.fleet.orchestrator.metrics
        self.main = Starlette()
        self.ending = asyncio.Event()
        self.main.state.omni_hold = Hold(
            self.fleet.orchestrator,
            self._until_serving,
            replica_wait,
            self._closed_reason,
            self._until_ending,
            max_bytes,
        )
        self._serving = asyncio.Event()
        self._member = self.fleet.pool.add(0)
        self._answer = answer
        self.app = HoldMiddleware(self._answer_all, PATHS, has_key)

    def _closed_reason(self) -> str:
        return SHUTTING_DOWN if self.ending.is_set() else ""

    def request(
        self, path: str = "/v1/completions", method: str = "POST", root_path: str = "", key: str = "", **more: Any
    ) -> Client:
        """Send a request up to its body."""
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope = {"type": "http", "path": path, "method": method, "root_path": root_path, "headers": headers}
        return Client(self.app, {**scope, "app": self.main, **more})

    def serve(self) -> None:
        """Let the replica serve."""
        self.fleet.join(self._member)
        self._serving.set()

    async def has_waiting(self, number: int) -> None:
        """Return when so many requests wait."""
        await eventually(lambda: self.metrics.held_before_accept == number, f"the waiting of {number} requests")

    async def _until_serving(self) -> None:
        await self._serving.wait()

    async def _until_ending(self) -> None:
        await self.ending.wait()

    async def _answer_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)


async def test_a_request_waits_until_a_replica_serves() -> None:
    server = Server()
    client = server.request()
    client.upload(b"prompt")
    await server.has_waiting(1)
    assert client.sent == []
    server.serve()
    assert await client.status() == 200
    assert client.body == b"prompt"
    assert server.metrics.held_before_accept == 0
    assert server.metrics.requests_failed_before_accept == 0


@pytest.mark.parametrize(
    ("path", "method"),
    [("/v1/completions", "GET"), ("/tokenize", "POST"), ("/v1/models", "GET"), ("/pause", "POST")],
)
async def test_requests_without_an_engine_are_never_held(path: str, method: str) -> None:
    client = Server().request(path, method)
    client.upload(b"")
    assert await client.status() == 200


@pytest.mark.parametrize("ending", [False, True])
async def test_a_failing_health_check_says_why(ending: bool) -> None:
    server = Server()
    if ending:
        server.ending.set()
    client = server.request("/health", "GET", root_path="/ai")
    client.upload(b"")
    assert await client.status() == 503
    assert client.body.decode() == (
        f"{SHUTTING_DOWN}\n"
        if ending
        else "No replica of stage 0 can serve right now (replica 0 is down). Please try again later.\n"
    )


async def test_a_path_below_the_root_path_waits_too() -> None:
    server = Server(replica_wait=0.01)
    assert await server.request("/api/pooling", root_path="/api").status() == 503


async def test_a_refusal_has_retry_after_and_the_format_of_openai() -> None:
    server = Server(replica_wait=0.01)
    client = server.request()
    client.upload(b"prompt")
    assert await client.status() == 503
    assert client.headers["retry-after"] == str(RETRY_AFTER_S)
    assert {**client.error, "message": ""} == {
        "message": "",
        "type": "Service Unavailable",
        "param": None,
        "code": 503,
    }
    assert client.error["message"] == (
        "No replica of stage 0 can serve right now (replica 0 is down); the request waited 0.01 s. "
        "Please try again later."
    )
    assert (server.metrics.held_before_accept, server.metrics.requests_failed_before_accept) == (0, 1)


async def test_the_number_of_held_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "MAX_WAITING", 2)
    server = Server()
    held = [server.request(), server.request()]
    await server.has_waiting(2)
    refused = server.request()
    assert await refused.status() == 503
    assert "2 requests wait already" in refused.error["message"]
    server.serve()
    for client in held:
        client.upload(b"prompt")
        assert await client.status() == 200


async def test_the_bytes_of_held_bodies_are_bounded_and_freed() -> None:
    server = Server(max_bytes=1 << 20)
    held = server.request()
    held.upload(bytes(700_000))
    await eventually(lambda: server.metrics.held_bytes_before_accept == 700_000, "the first body")
    refused = server.request()
    refused.upload(bytes(400_000), more=True)
    assert await refused.status() == 503
    assert (
        "the bodies of waiting requests have more than 1 MiB, see --omni-max-buffered-size" in refused.error["message"]
    )
    assert server.metrics.held_bytes_before_accept == 700_000
    server.serve()
    assert await held.status() == 200
    assert server.metrics.held_bytes_before_accept == 0


async def test_a_server_that_shuts_down_refuses_held_and_new_requests() -> None:
    server = Server()
    waiting = server.request()
    await server.has_waiting(1)
    server.ending.set()
    late = server.request()
    for client in (waiting, late):
        assert await client.status() == 503
        assert client.error["message"] == "The server is shutting down."
        assert client.headers["retry-after"] == str(RETRY_AFTER_S)
    assert server.metrics.held_before_accept == 0


async def test_a_client_that_disconnects_frees_its_place() -> None:
    server = Server()
    client = server.request()
    client.upload(b"pro", more=True)
    client.upload(b"mpt")
    await server.has_waiting(1)
    client.disconnect()
    assert await client.status() == CLIENT_CLOSED_REQUEST
    assert (server.metrics.held_before_accept, server.metrics.requests_failed_before_accept) == (0, 0)


async def test_a_body_that_comes_in_parts_before_and_after_the_wait_is_complete() -> None:
    server = Server()
    client = server.request()
    client.upload(b"a", more=True)
    client.upload(b"b", more=True)
    await client.read_by_server()
    await server.has_waiting(1)
    server.serve()
    await server.has_waiting(0)
    client.upload(b"c", more=True)
    client.upload(b"d")
    assert await client.status() == 200
    assert client.body == b"abcd"


async def test_the_application_gets_a_disconnect_after_the_wait() -> None:
    async def until_disconnect(request: Request) -> Response:
        await request.body()
        assert (await request.receive())["type"] == "http.disconnect"
        return PlainTextResponse("seen")

    server = Server(answer=until_disconnect)
    client = server.request()
    client.upload(b"prompt")
    await server.has_waiting(1)
    server.serve()
    await server.has_waiting(0)
    client.disconnect()
    assert await client.status() == 200
    assert client.body == b"seen"


async def test_a_503_of_the_application_gets_retry_after_and_keeps_its_own() -> None:
    plain, own = Server(answer=unavailable), Server(answer=own_retry_after)
    for server, expected in ((plain, str(RETRY_AFTER_S)), (own, "77")):
        server.serve()
        client = server.request()
        assert await client.status() == 503
        assert client.headers["retry-after"] == expected


@pytest.mark.parametrize("left", [0.01, 0.0])
async def test_a_request_is_held_no_longer_than_its_deadline_allows(left: float) -> None:
    server = Server()
    client = server.request(**{LONGEST_HOLD: left})
    client.upload(b"prompt")
    assert await client.status() == 503
    assert f"waited {left:g} s".encode() in client.body
    assert server.metrics.requests_failed_before_accept == 1
