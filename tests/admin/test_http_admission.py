"""Admission over HTTP: tenants, refusals before the application runs, and later refusals."""

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from math import inf
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.admin.asgi import EVENTS, Client, part, start
from vllm_omni_plugin.admin.hold import CLIENT_CLOSED_REQUEST, LONGEST_HOLD
from vllm_omni_plugin.admin.http_admission import (
    FAIRNESS_HEADER,
    TENANT_HEADER,
    AdmissionMiddleware,
    DeferredResponse,
    HttpAdmission,
    current_response,
    tenant_headers,
)
from vllm_omni_plugin.admission import RefusalReason, RequestTerms
from vllm_omni_plugin.errors import RequestRefusedError

PATH = "/v1/completions"
BOTH_HEADERS = (TENANT_HEADER, FAIRNESS_HEADER)
FULL = RequestRefusedError(HTTPStatus.SERVICE_UNAVAILABLE, RefusalReason.QUEUE_FULL, "The queue is full.", 7)
OVER_SHARE = RequestRefusedError(HTTPStatus.TOO_MANY_REQUESTS, RefusalReason.QUEUE_FULL, "Tenant 'a' has its share.", 3)
JSON = [(b"content-type", b"application/json")]


class Head:
    """An application behind the middleware.

    Args:
        refused: the refusal for a priority.
        keys: the server's API keys; none: it has none.

    Attributes:
        counted: refusals before the application saw the request.
        asked: terms and priorities of the calls of `expected_refusal`.
        seen: terms of the requests submitted to the fleet.
    """

    def __init__(
        self,
        app: ASGIApp | None = None,
        refused: Callable[[int | None], RequestRefusedError | None] = lambda _: None,
        headers: tuple[str, ...] = BOTH_HEADERS,
        keys: tuple[str, ...] = (),
    ) -> None:
        self.now = 100.0
        self.counted: list[RequestRefusedError] = []
        self.asked: list[tuple[RequestTerms, int | None]] = []
        self.seen: list[RequestTerms] = []
        self._refused = refused
        self._main = Starlette()
        self._main.state.omni_admission = HttpAdmission(
            self._refusal,
            lambda _: True,
            self.counted.append,
            headers,
            lambda: self.now,
            lambda terms: inf if terms.timeout_s is None else terms.timeout_s - 0.5,
        )
        self.app = AdmissionMiddleware(
            app or self.submitting,
            frozenset({PATH}),
            lambda headers: not keys or headers.get("authorization") in {f"Bearer {key}" for key in keys},
        )

    def request(self, path: str = PATH, method: str = "POST", **headers: str) -> Client:
        """Send a request up to its body."""
        # In upper case it is the same header once more.
        pairs = [(name.lower().replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "method": method, "headers": pairs, "app": self._main}
        return Client(self.app, scope)

    def _refusal(self, terms: RequestTerms, priority: int | None, now: float) -> RequestRefusedError | None:
        assert now == self.now
        self.asked.append((terms, priority))
        return self._refused(priority)

    def submit(self) -> DeferredResponse:
        """Submit a request to the fleet for the current response."""
        response = current_response()
        assert response is not None
        self.seen.append(response.add_request("r", self.now))
        return response

    async def submitting(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.submit()
        body = await Request(scope, receive).body()
        await send(start(headers=JSON))
        await send(part(body, more=False))


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        pytest.param({}, "", id="no tenant"),
        pytest.param({"x_tenant_id": "acme"}, "acme", id="by the header"),
        pytest.param({"x_tenant_id": " ", "x_gateway_fairness_id": "flow"}, "flow", id="an empty name is none"),
        pytest.param({"x_gateway_fairness_id": "flow", "x_tenant_id": "acme"}, "acme", id="the first one counts"),
        pytest.param({"x_tenant_id": "caf\u00e9"}, "caf\u00e9", id="in Latin-1"),
        pytest.param({"x_tenant_id": "caf\u00c3\u00a9"}, "caf\u00e9", id="in UTF-8"),
        pytest.param({"authorization": "Bearer sk-1"}, "key-0f2c10bf", id="by the key"),
        pytest.param({"authorization": "bearer sk-1", "x_tenant_id": "acme"}, "acme", id="a name before the key"),
        pytest.param({"authorization": "Basic sk-1"}, "", id="no key"),
        pytest.param({"authorization": "Bearer "}, "", id="an empty key"),
    ],
)
async def test_a_tenant_is_named_by_a_header_or_by_its_key(headers: dict[str, str], tenant: str) -> None:
    for names, expected in ((BOTH_HEADERS, tenant), ((), "")):
        head = Head(headers=names)
        client = head.request(**headers)
        client.upload(b"")
        await client.status()
        assert head.seen == [RequestTerms(expected)]


async def test_of_a_header_that_is_sent_twice_the_first_counts_whose_key_was_checked() -> None:
    head = Head(keys=("right",))
    client = head.request(authorization="Bearer right", AUTHORIZATION="Bearer made-up")
    client.upload(b"")
    await client.status()
    assert head.seen == [RequestTerms("key-27042f4e")]


@pytest.mark.parametrize("authorization", ["", "Bearer made-up", "Basic right"])
async def test_requests_without_a_valid_key_are_one_tenant_without_a_better_priority_whatever_they_say(
    authorization: str,
) -> None:
    head = Head(keys=("right",), refused=lambda priority: FULL if priority in (None, 3) else None)
    for tenant, priority in (("acme", b"-5"), ("made-up", b"3")):
        client = head.request(authorization=authorization, x_tenant_id=tenant, x_request_timeout="2")
        client.upload(b'{"priority": %s}' % priority)
        assert await client.status() == (200 if priority == b"-5" else 503)
    stranger = RequestTerms("", 2.0, anonymous=True)
    assert head.asked == [(stranger, None), (stranger, 0), (stranger, None), (stranger, 3)]
    assert head.seen == [stranger]
    keyed = head.request(authorization="Bearer right", x_tenant_id="acme")
    keyed.upload(b"{}")
    await keyed.status()
    assert head.seen[1:] == [RequestTerms("acme")]


@pytest.mark.parametrize(
    ("named", "plan", "headers"),
    [
        (None, None, ()),
        (None, "admission.yaml", ("X-Tenant-ID", "x-gateway-fairness-id")),
        ("X-Team", None, ("X-Team",)),
        ("X-Team", "admission.yaml", ("X-Team",)),
    ],
)
def test_the_flags_choose_the_tenant_headers(named: str | None, plan: str | None, headers: tuple[str, ...]) -> None:
    assert tenant_headers(named, plan) == headers


async def test_deadlines_count_from_the_arrival_of_an_answers_first_request_and_its_later_ones_have_as_long() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        head.now += 2.0
        longest.append(scope[LONGEST_HOLD])
        head.submit()
        head.now += 5.0
        head.submit()
        await send(start())
        await send(part(b"", more=False))

    longest: list[float] = []
    head = Head(slow)
    assert await head.request(x_request_timeout="2.5", x_tenant_id="a").status() == 200
    assert longest == [2.0]
    assert head.asked == [(RequestTerms("a", 2.5), None)]
    assert head.seen == [RequestTerms("a", 2.5, waited_s=2.0)] * 2


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "1e999", "10s"])
async def test_an_invalid_timeout_is_refused_with_the_header_name(text: str) -> None:
    head = Head()
    client = head.request(x_request_timeout=text)
    assert await client.status() == 400
    message = f"X-Request-Timeout: {text!r} is not a number of seconds above 0."
    assert client.error == {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    assert (head.asked, head.seen) == ([], [])


@pytest.mark.parametrize(
    ("refused", "status", "kind"), [(FULL, 503, "Service Unavailable"), (OVER_SHARE, 429, "rate_limit_exceeded")]
)
async def test_a_request_is_refused_before_the_application_sees_it(
    refused: RequestRefusedError, status: int, kind: str
) -> None:
    head = Head(refused=lambda _: refused)
    client = head.request()
    client.upload(b'{"prompt": ', more=True)
    client.upload(b'"Hello", "priority": 3}')
    assert await client.status() == status
    assert client.headers["retry-after"] == str(refused.retry_after_s)
    assert client.error == {"message": str(refused), "type": kind, "param": None, "code": status}
    assert head.asked == [(RequestTerms(), None), (RequestTerms(), 3)]
    assert (head.seen, head.counted) == ([], [refused])


async def test_the_body_of_a_request_admitted_by_its_priority_is_complete() -> None:
    head = Head(refused=lambda priority: None if priority == 5 else FULL)
    client = head.request()
    body = b'{"prompt": "Hello", "priority": 5, "stream": false}'
    client.upload(body[:20], more=True)
    client.upload(body[20:])
    assert await client.status() == 200
    assert client.body == body
    assert head.counted == []


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (b"", []),
        (b"--form", []),
        (b"[1]", []),
        (b'{"priority": null}', []),
        (b'{"priority": "3"}', []),
        (b'{"prompt": ' + b"[" * 100_000, []),
        (b"{}", [(RequestTerms(), 0)]),
        (b'{"priority": -9}', [(RequestTerms(), -9)]),
    ],
)
async def test_a_priority_that_cannot_be_decoded_does_not_admit_a_request(body: bytes, asked: list[Any]) -> None:
    head = Head(refused=lambda _: FULL)
    client = head.request()
    client.upload(body)
    assert await client.status() == 503
    assert head.asked == [(RequestTerms(), None), *asked]


async def test_a_client_that_disconnects_before_a_refusal_is_no_server_error() -> None:
    head = Head(refused=lambda _: FULL)
    client = head.request()
    client.upload(b"{", more=True)
    client.disconnect()
    assert await client.status() == CLIENT_CLOSED_REQUEST


@pytest.mark.parametrize(("path", "method"), [(PATH, "GET"), ("/tokenize", "POST")])
async def test_requests_without_an_engine_are_not_checked(path: str, method: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert current_response() is None
        await send(start())

    head = Head(app, lambda _: FULL)
    assert await head.request(path, method).status() == 200
    assert head.asked == []


class Stream:
    """A stream like vLLM's, whose outputs the test sends. `tests/contract/test_refusals_over_http.py` has its own."""

    def __init__(self) -> None:
        self.submitted = asyncio.Event()
        self.outputs: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.response: DeferredResponse | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(headers=EVENTS))
        self.response = current_response()
        assert self.response is not None
        self.response.add_request("r", 100.0)
        self.submitted.set()
        while True:
            message = await self.outputs.get()
            if isinstance(message, Exception):
                raise message
            await send(message)
            if not message["more_body"]:
                return

    async def begun(self) -> Client:
        """Its client, once the request was submitted."""
        client = Head(self).request()
        async with asyncio.timeout(10):
            await self.submitted.wait()
        return client

    def fail(self, error: Exception) -> bool:
        """Fail its request. Returns whether the client gets a refusal instead of vLLM's error."""
        assert self.response is not None
        return self.response.refuse(error)


async def test_a_stream_that_is_refused_while_it_waits_gets_the_correct_status_although_it_raises() -> None:
    stream = Stream()
    client = await stream.begun()
    assert stream.fail(OVER_SHARE)
    stream.outputs.put_nowait(RuntimeError("the response has started"))
    assert await client.status() == 429
    assert client.headers["retry-after"] == "3"
    assert client.error["message"] == str(OVER_SHARE)
    assert len(client.sent) == 2


async def test_a_started_response_keeps_its_status_when_a_further_request_is_refused() -> None:
    stream = Stream()
    client = Head(stream).request()
    stream.outputs.put_nowait(part(b"data: one\n\n"))
    await client.sent_so_far(2)
    assert not stream.fail(OVER_SHARE)
    stream.outputs.put_nowait(RuntimeError("after the beginning"))
    with pytest.raises(RuntimeError, match="after the beginning"):
        await client.status()
    assert client.sent == [start(headers=EVENTS), part(b"data: one\n\n")]


async def test_concurrent_answers_do_not_mix() -> None:
    streams = {"a": Stream(), "b": Stream()}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        tenant = dict(scope["headers"])[b"x-tenant-id"].decode()
        # Like vLLM, which creates a task for the response.
        await asyncio.create_task(streams[tenant](scope, receive, send))

    head = Head(app)
    clients = {tenant: head.request(x_tenant_id=tenant) for tenant in streams}
    async with asyncio.timeout(10):
        for stream in streams.values():
            await stream.submitted.wait()
    assert streams["a"].fail(OVER_SHARE)
    for stream in streams.values():
        stream.outputs.put_nowait(part(b"data: last\n\n", more=False))
    assert {tenant: await client.status() for tenant, client in clients.items()} == {"a": 429, "b": 200}
    assert json.loads(clients["a"].body)["error"]["code"] == 429
