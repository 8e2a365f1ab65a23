"""The header that names the replicas, with fake applications."""

import asyncio
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.admin.asgi import EVENTS, Client, part, start
from vllm_omni_plugin.admin.replica_header import ReplicaHeaderMiddleware, new_chosen_replicas
from vllm_omni_plugin.balancing import Decision

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


def send_to(*replicas: str) -> None:
    """A request that is sent to these replicas, one after the other."""
    chosen_replicas = new_chosen_replicas()
    assert chosen_replicas is not None
    chosen_replicas += [(replica, Decision(0, "least-load")) for replica in replicas]


def answering(*requests: str, status: int = 200) -> ASGIApp:
    """An application that makes one request for each list of replicas."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for replicas in requests:
            send_to(*replicas.split())
        await send(start(status))
        await send(part(b"{}", more=False))

    return app


async def answer_of(app: ASGIApp, scope: Scope = SCOPE) -> Client:
    client = Client(ReplicaHeaderMiddleware(app), scope)
    async with asyncio.timeout(10):
        await client.request
    return client


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        pytest.param(("0.1",), "0.1", id="one"),
        pytest.param(("0.2", "0.0", "0.2"), "0.2, 0.0", id="several, each once, in their order"),
        pytest.param(("0.0 0.1",), "0.1", id="moved"),
        pytest.param(("0.1 1.0 1.2 2.0", "0.1 1.3"), "0.1, 1.2, 2.0, 1.3", id="pipeline"),
    ],
)
async def test_an_answer_names_its_replicas_and_is_otherwise_unchanged(requests: tuple[str, ...], named: str) -> None:
    client = await answer_of(answering(*requests, status=418))
    assert client.headers == {"x-omni-replica": named}
    assert (client.sent[0]["status"], client.sent[1:]) == (418, [part(b"{}", more=False)])


async def test_concurrent_answers_do_not_mix() -> None:
    both_made = asyncio.Barrier(2)

    def app_of(replica: str) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            send_to(replica)
            await both_made.wait()
            await answering()(scope, receive, send)

        return app

    answers = await asyncio.gather(answer_of(app_of("0.0")), answer_of(app_of("0.1")))
    assert [answer.headers["x-omni-replica"] for answer in answers] == ["0.0", "0.1"]


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    """Starts the stream before it sends a request, like vLLM."""
    await send(start(headers=EVENTS))
    send_to("0.1")
    await send(part(b"data: one\n\n"))
    await send(part(b"", more=False))


async def test_a_stream_is_neither_buffered_nor_changed() -> None:
    expected = [start(headers=EVENTS), part(b"data: one\n\n"), part(b"", more=False)]
    assert (await answer_of(stream)).sent == expected


@pytest.mark.parametrize("scope", [SCOPE | {"method": "GET"}, {"type": "websocket", "path": "/v1/realtime"}])
async def test_other_requests_are_not_changed(scope: Scope) -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(new_chosen_replicas())
        await send(start())

    assert ((await answer_of(app, scope)).sent, seen) == ([start()], [None])
