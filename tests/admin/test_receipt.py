"""The header that names the replica, over applications that the test plays."""

import asyncio
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.admin.asgi import Client
from tests.fakes.conditions import eventually
from vllm_omni_plugin.admin.receipt import ReceiptMiddleware, new_receipt
from vllm_omni_plugin.balancing.base import Decision
from vllm_omni_plugin.orchestrator.messages import Receipt

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
DECISION = Decision(0, "least-load")


def start(status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": []}


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def dispatch(*replicas: str) -> Receipt:
    """A request to the engines that goes to these replicas, one after the other, before its answer begins."""
    receipt = new_receipt()
    assert receipt is not None
    for replica in replicas:
        receipt.append((replica, DECISION))
    return receipt


def answering(*replicas: str, status: int = 200) -> ASGIApp:
    """An application that makes a request for each replica and then answers."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for replica in replicas:
            dispatch(replica)
        await send(start(status))
        await send(part(b"{}", more=False))

    return app


async def answer_of(app: ASGIApp) -> Client:
    client = Client(ReceiptMiddleware(app), SCOPE)
    async with asyncio.timeout(10):
        await client.request
    return client


async def test_an_answer_names_its_replica_and_is_otherwise_what_it_was() -> None:
    client = await answer_of(answering("0.1", status=418))
    assert client.headers == {"x-omni-replica": "0.1"}
    assert client.sent[0]["status"] == 418
    assert client.sent[1:] == [part(b"{}", more=False)]


async def test_an_answer_without_a_request_to_the_engines_names_none() -> None:
    assert (await answer_of(answering())).headers == {}


async def test_a_request_that_was_never_dispatched_names_none() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        new_receipt()
        await answering()(scope, receive, send)

    assert (await answer_of(app)).headers == {}


async def test_several_requests_name_every_replica_once_in_their_order() -> None:
    client = await answer_of(answering("0.2", "0.0", "0.2"))
    assert client.headers == {"x-omni-replica": "0.2, 0.0"}


async def test_a_moved_request_names_the_replica_of_its_first_output() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        dispatch("0.0", "0.1")
        await answering()(scope, receive, send)

    assert (await answer_of(app)).headers == {"x-omni-replica": "0.1"}


async def test_a_pipelines_answer_names_a_replica_of_each_stage() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        dispatch("0.1", "1.0", "1.2", "2.0")
        dispatch("0.1", "1.3")
        await answering()(scope, receive, send)

    assert (await answer_of(app)).headers == {"x-omni-replica": "0.1, 1.2, 2.0, 1.3"}


async def test_requests_made_in_tasks_of_the_answer_are_seen() -> None:
    async def request() -> None:
        await asyncio.create_task(asyncio.to_thread(dispatch, "0.1"))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.gather(request(), request())
        await answering()(scope, receive, send)

    assert (await answer_of(app)).headers == {"x-omni-replica": "0.1"}


async def test_answers_at_the_same_time_do_not_mix() -> None:
    both_made = asyncio.Barrier(2)

    def app_of(replica: str) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            dispatch(replica)
            await both_made.wait()
            await answering()(scope, receive, send)

        return app

    answers = await asyncio.gather(answer_of(app_of("0.0")), answer_of(app_of("0.1")))
    assert [answer.headers["x-omni-replica"] for answer in answers] == ["0.0", "0.1"]


async def test_a_stream_begins_when_it_is_dispatched_and_every_part_goes_out_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        receipt = dispatch()
        assert client.sent == []
        await asyncio.to_thread(receipt.append, ("0.1", DECISION))
        await eventually(lambda: len(client.sent) == 1)
        await send(part(b"one"))
        assert len(client.sent) == 2
        await send(part(b"two"))
        assert len(client.sent) == 3
        await send(part(b"", more=False))

    client = Client(ReceiptMiddleware(app), SCOPE)
    await client.request
    assert client.headers == {"x-omni-replica": "0.1"}
    assert client.body == b"onetwo"


async def test_a_stream_of_several_requests_begins_when_all_are_dispatched() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        first, second = dispatch(), dispatch()
        first.append(("0.1", DECISION))
        await send(part(b"one"))
        assert client.sent == []
        second.append(("0.0", DECISION))
        await eventually(lambda: len(client.sent) == 2)
        await send(part(b"", more=False))

    client = Client(ReceiptMiddleware(app), SCOPE)
    await client.request
    assert client.headers == {"x-omni-replica": "0.1, 0.0"}


async def test_events_before_any_request_to_the_engines_wait_for_the_replica_and_keep_their_order() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await send(part(b"created,"))
        await send(part(b"in progress,"))
        assert client.sent == []
        dispatch("0.1")
        await eventually(lambda: len(client.sent) == 3)
        await send(part(b"text,"))
        await send(part(b"end", more=False))

    client = Client(ReceiptMiddleware(app), SCOPE)
    await client.request
    assert client.headers == {"x-omni-replica": "0.1"}
    assert client.body == b"created,in progress,text,end"


async def test_a_dispatch_on_a_loop_that_has_ended_is_no_error() -> None:
    receipts: list[Receipt] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        receipts.append(dispatch())

    await asyncio.to_thread(asyncio.run, ReceiptMiddleware(app)(SCOPE, never_receive, ignore))
    receipts[0].append(("0.1", DECISION))


async def never_receive() -> Message:
    raise AssertionError("nobody reads the request")


async def ignore(message: Message) -> None:
    """A server that drops what it is told to send."""


async def test_a_stream_that_waits_for_a_replica_is_kept_alive() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        for _ in range(3):
            await send(part(b":"))
        assert client.body == b":::"
        await send(part(b":"))
        assert client.body == b"::::"

    client = Client(ReceiptMiddleware(app), SCOPE)
    await client.request
    assert client.headers == {}


async def test_an_empty_answer_ends() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(204))
        await send({"type": "http.response.body"})

    assert (await answer_of(app)).sent == [start(204), {"type": "http.response.body"}]


async def test_what_fails_before_its_first_part_has_not_begun() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        raise RuntimeError("no first output")

    client = Client(ReceiptMiddleware(app), SCOPE)
    with pytest.raises(RuntimeError):
        await client.request
    assert client.sent == []


@pytest.mark.parametrize("scope", [SCOPE | {"method": "GET"}, {"type": "websocket", "path": "/v1/realtime"}])
async def test_what_is_no_inference_over_http_passes(scope: Scope) -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(new_receipt())
        await send(start())
        assert client.sent == [start()]

    client = Client(ReceiptMiddleware(app), scope)
    await client.request
    assert seen == [None]


def test_outside_of_an_answer_nobody_asks_for_a_receipt() -> None:
    assert new_receipt() is None
