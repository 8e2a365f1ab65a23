"""ASGI requests of simulated clients."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admin.access import Access
from vllm_omni_plugin.admin.operator_actions import FleetAdmin, HeadDrain
from vllm_omni_plugin.admin.routes import build_router
from vllm_omni_plugin.admin.watch.fleet_broadcast import FleetBroadcast
from vllm_omni_plugin.admin.watch.fleet_view import FleetView, TokenRates
from vllm_omni_plugin.admin.watch.watch_routes import build_watch_router
from vllm_omni_plugin.pipeline import Pipeline

CHANGES = (
    ("DELETE", "/omni/replicas/0.0"),
    ("POST", "/omni/replicas/0.0/drain"),
    ("POST", "/omni/replicas/0.0/resume"),
    ("POST", "/omni/drain"),
    ("POST", "/omni/resume"),
    ("POST", "/omni/explain"),
)
"""Requests that need write access."""
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
"""Headers of a stream of events."""


def start(status: int = 200, headers: Any = ()) -> Message:
    """The message with which an answer starts."""
    return {"type": "http.response.start", "status": status, "headers": [*headers]}


def part(body: bytes, more: bool = True) -> Message:
    """A message with a part of the body of an answer."""
    return {"type": "http.response.body", "body": body, "more_body": more}


def app_of(fleet: FakeFleet | None, *, has_admin_key: bool = True, **local: bool) -> FastAPI:
    """A server with our routes that accepts every API key, and every request as one with an admin key, or none.

    `local`: attributes of `Access`.
    """
    app = FastAPI()
    access = Access(lambda _: True, lambda _: has_admin_key, **local)
    app.include_router(build_router(access))
    app.include_router(build_watch_router(access))
    if fleet is not None:
        app.state.omni_drain = HeadDrain(fleet.orchestrator.events)
        app.state.omni_broadcast = broadcast_of(fleet, app.state.omni_drain)
        app.state.omni_fleet = FleetAdmin(fleet.orchestrator, fleet.fleet_calls, lambda: fleet.now)
    return app


def view_of(fleet: FakeFleet, drain: HeadDrain | None = None, pipeline: Pipeline | None = None) -> FleetView:
    """The state of a fleet as data."""
    drain, rates = drain or HeadDrain(fleet.orchestrator.events), TokenRates(CollectorRegistry(), lambda: fleet.now)
    names = {"name": "here", "vllm": "0", "plugin": "0"}
    clocks = (lambda: fleet.now, lambda: 1000.0)
    return FleetView(fleet.orchestrator, drain, lambda: False, rates, names, pipeline, *clocks)


def broadcast_of(
    fleet: FakeFleet, drain: HeadDrain | None = None, tick: float = 0.01, is_over: Callable[[], bool] = lambda: False
) -> FleetBroadcast:
    return FleetBroadcast(view_of(fleet, drain), fleet.orchestrator.events, is_over, tick)


@asynccontextmanager
async def served(app: FastAPI, listener: socket.socket, **settings: Any) -> AsyncIterator[uvicorn.Server]:
    """The application behind uvicorn, as vLLM starts it. The server must end with the block."""
    with listener:
        app.state.server = server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", **settings))
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield server
        finally:
            server.should_exit = True
            async with asyncio.timeout(10):
                await serving


def client_of(app: FastAPI, address: str | None = "127.0.0.1", **headers: str) -> httpx.AsyncClient:
    """A client; `address` None if it is unknown."""
    transport: Any = httpx.ASGITransport(app, client=(address, 40000) if address else None)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://head", headers=headers)


class Client:
    """Sends one request and notes the answer.

    Args:
        app: the application under test.
        scope: the request up to its body.

    Attributes:
        sent: what the application has sent so far.
        request: done when the application is done with the request.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]], scope: Scope) -> None:
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.request = asyncio.create_task(app(scope, self._inbox.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def upload(self, body: bytes, more: bool = False) -> None:
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def read_by_server(self) -> None:
        """Return when the server has received everything."""
        await eventually(self._inbox.empty, "the reading of a request")

    async def sent_so_far(self, number: int) -> None:
        """Return when the application has sent `count` messages."""
        await eventually(lambda: len(self.sent) >= number, f"message {number} of an answer")

    async def status(self) -> int:
        async with asyncio.timeout(10):
            await self.request
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error
