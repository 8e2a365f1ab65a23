"""Events and state of the fleet, single and as streams, and the page."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import HTTPException
from starlette.types import Message

from tests.admin.asgi import Client, app_of, broadcast_of, client_of, served
from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admin.watch import fleet_broadcast, watch_routes
from vllm_omni_plugin.admin.watch.fleet_broadcast import FleetBroadcast
from vllm_omni_plugin.admin.watch.fleet_view import FleetView
from vllm_omni_plugin.admin.watch.server_sent import COMMENT
from vllm_omni_plugin.admin.watch.watch_routes import EventStreamResponse
from vllm_omni_plugin.orchestrator.event_log import EventKind


@pytest.fixture
def broadcast(fleet: FakeFleet) -> FleetBroadcast:
    return broadcast_of(fleet)


async def messages(stream: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, Any]]:
    async with aclosing(stream) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            for block in chunk.decode().split("\n\n")[:-1]:
                fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
                if fields:
                    yield fields["event"], json.loads(fields["data"])


async def first(stream: AsyncIterator[Any]) -> Any:
    async with asyncio.timeout(10):
        return await anext(stream)


async def next_state(stream: AsyncIterator[tuple[str, Any]]) -> Any:
    while True:
        kind, content = await first(stream)
        if kind == "state":
            return content


async def test_events_are_listed_oldest_first_after_a_given_one(fleet: FakeFleet) -> None:
    fleet.kill(1)
    fleet.orchestrator.cordon(fleet.pool.member(0), "admin")
    async with client_of(app_of(fleet)) as client:
        events = (await client.get("/omni/events")).json()["events"]
        known = {"Last-Event-ID": str(events[0]["id"])}
        later = (await client.get("/omni/events", headers=known)).json()["events"]
    assert [(event["kind"], event["replica"], event["stage"]) for event in events] == [
        ("lost", "0.1", 0),
        ("drain", "0.0", 0),
    ]
    assert later == events[1:]
    assert set(events[0]) == {"id", "time", "kind", "stage", "replica", "reason", "requests"}


async def test_a_stream_has_the_kept_events_and_then_new_ones(fleet: FakeFleet, broadcast: FleetBroadcast) -> None:
    fleet.kill(1)
    stream = messages(broadcast.stream())
    assert (await first(stream))[0] == "lost"
    fleet.orchestrator.cordon(fleet.pool.member(0), "admin")
    kind, event = await first(stream)
    assert (kind, event["reason"]) == ("drain", "an operator drains it")


async def test_an_event_of_another_thread_reaches_the_stream(fleet: FakeFleet, broadcast: FleetBroadcast) -> None:
    broadcast = broadcast_of(fleet, tick=600.0)
    stream = messages(broadcast.stream())
    waiting = asyncio.create_task(first(stream))
    await eventually(lambda: broadcast.is_producing, "the viewer")
    await asyncio.to_thread(fleet.orchestrator.events.record, EventKind.DRAIN, "elsewhere")
    assert (await waiting)[1]["reason"] == "elsewhere"


async def test_a_slow_viewer_gets_the_newest_state_and_delays_no_other(
    fleet: FakeFleet, broadcast: FleetBroadcast
) -> None:
    slow, quick = messages(broadcast.stream(with_state=True)), messages(broadcast.stream(with_state=True))
    for stream in (slow, quick):
        assert (await first(stream))[0] == "history"
        assert (await first(stream))[0] == "state"
    fleet.kill(1)
    state = {"stages": [{"replicas": [{}, {"status": "up"}]}]}
    while state["stages"][0]["replicas"][1]["status"] == "up":
        state = await next_state(quick)
    assert (await next_state(slow))["stages"][0]["replicas"][1]["status"] == "down"


async def test_one_producer_serves_all_viewers(
    fleet: FakeFleet, broadcast: FleetBroadcast, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    own_state = FleetView.state

    def state(view: FleetView) -> dict[str, Any]:
        made.append(1)
        return own_state(view)

    monkeypatch.setattr(FleetView, "state", state)
    assert (broadcast.is_producing, fleet.orchestrator.events.on_event) == (False, None)
    streams = [messages(broadcast.stream(with_state=True)) for _ in range(20)]
    for stream in streams:
        assert (await first(stream))[0] == "history"
    states = [await first(stream) for stream in streams]
    assert len({json.dumps(state) for state in states}) <= len(made) < 20
    assert fleet.orchestrator.events.on_event is not None


async def test_the_producer_ends_some_time_after_the_last_viewer(
    fleet: FakeFleet, broadcast: FleetBroadcast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_broadcast, "HISTORY", 1)
    stream = broadcast.stream(with_state=True)
    await first(stream)
    await stream.aclose()
    await eventually(lambda: not broadcast.is_producing, "the end of the producer")
    assert fleet.orchestrator.events.on_event is None
    assert (await first(messages(broadcast.stream(with_state=True))))[0] == "history", "it begins again for the next"


async def test_a_viewer_that_joins_while_the_producer_ends_gets_states(
    fleet: FakeFleet, broadcast: FleetBroadcast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_broadcast, "HISTORY", 1)
    monkeypatch.setattr(fleet_broadcast, "SAMPLE_EVERY", 1)
    broadcast = broadcast_of(fleet, tick=0.2)
    sampled: list[int] = []
    own_sample = FleetView.sample

    def sample(view: FleetView) -> Any:
        sampled.append(1)
        return own_sample(view)

    monkeypatch.setattr(FleetView, "sample", sample)
    leaving = broadcast.stream(with_state=True)
    await first(leaving)
    await leaving.aclose()
    await eventually(lambda: sampled == [1], "the last tick alone")
    stream = messages(broadcast.stream(with_state=True))
    assert [(await first(stream))[0] for _ in range(3)] == ["history", "state", "state"]


async def test_a_failed_state_is_skipped_and_logged_once(
    fleet: FakeFleet, broadcast: FleetBroadcast, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[int] = []
    own_state = FleetView.state

    def state(view: FleetView) -> dict[str, Any]:
        if not failed:
            failed.append(1)
            raise KeyError("a member that has just left")
        return own_state(view)

    monkeypatch.setattr(FleetView, "state", state)
    stream = messages(broadcast.stream(with_state=True))
    assert [(await first(stream))[0] for _ in range(2)] == ["history", "state"]
    assert failed
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("has_producer", [True, False])
async def test_streams_end_with_the_server(fleet: FakeFleet, has_producer: bool) -> None:
    over: list[int] = []
    broadcast = broadcast_of(fleet, is_over=lambda: bool(over))
    streams = [broadcast.stream(), broadcast.stream(with_state=True)]
    reading = [asyncio.create_task(_read_all(stream)) for stream in streams]
    # They wait now, and the producer has not begun.
    await asyncio.sleep(0)
    if not has_producer:
        (producer,) = [task for task in asyncio.all_tasks() if task.get_name() == "omni-broadcast"]
        producer.cancel()
    over.append(1)
    async with asyncio.timeout(10):
        await asyncio.gather(*reading)
    assert not broadcast.is_producing


async def _read_all(stream: AsyncIterator[bytes]) -> None:
    async for _ in stream:
        pass


async def test_the_number_of_streams_is_limited(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(fleet)
    monkeypatch.setattr(FleetBroadcast, "is_full", True)
    async with client_of(app, Accept="text/event-stream") as client:
        answers = [await client.get(path) for path in ("/omni/events", "/omni/fleet")]
    assert [(answer.status_code, answer.headers["retry-after"]) for answer in answers] == [(503, "5")] * 2


async def test_a_stream_counts_before_its_first_byte_is_sent(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_broadcast, "MAX_VIEWERS", 1)
    app, broadcast = app_of(fleet), broadcast_of(fleet)
    asked: list[int] = []
    released = asyncio.Event()

    async def ask() -> None:
        async def send(message: Message) -> None:
            asked.append(message.get("status", 0))
            await released.wait()

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "app": app, "asgi": {}}
        await EventStreamResponse(broadcast, broadcast.stream())(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]

    waiting = asyncio.create_task(ask())
    await eventually(lambda: asked == [200], "the first stream")
    with pytest.raises(HTTPException):
        await ask()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not broadcast.is_full, "who has gone leaves its place"


async def test_a_viewer_that_does_not_read_is_disconnected(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_routes, "SEND_TIMEOUT_S", 0.1)
    monkeypatch.setattr(FleetView, "state", lambda _: {"much": "x" * 2_000_000})
    async with one_viewer(fleet, monkeypatch) as (broadcast, server, _):
        await eventually(lambda: not broadcast.is_full, "its place")
        await eventually(lambda: not server.server_state.connections, "the end of its connection")


@asynccontextmanager
async def one_viewer(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, path: str = "/omni/fleet"
) -> AsyncIterator[tuple[FleetBroadcast, uvicorn.Server, socket.socket]]:
    """A server whose only viewer does not read."""
    monkeypatch.setattr(fleet_broadcast, "MAX_VIEWERS", 1)
    app = app_of(fleet)
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()) as viewer:
        async with served(app, listener) as server:
            viewer.sendall(f"GET {path} HTTP/1.1\r\nHost: head\r\nAccept: text/event-stream\r\n\r\n".encode())
            await eventually(lambda: app.state.omni_broadcast.is_full, "the viewer")
            yield app.state.omni_broadcast, server, viewer


@pytest.mark.parametrize("known", ["other-1", "9" * 9999, "nonsense", "here--1", "here-1000"])
async def test_an_unknown_last_event_id_gets_all_events(fleet: FakeFleet, known: str) -> None:
    fleet.kill(1)
    async with client_of(app_of(fleet)) as client:
        everything = (await client.get("/omni/events")).json()["events"]
        events = (await client.get("/omni/events", headers={"Last-Event-ID": known})).json()["events"]
    assert events == everything != []


async def test_the_fleet_stream_has_states_and_events_and_continues_after_the_last_id(
    fleet: FakeFleet, broadcast: FleetBroadcast
) -> None:
    fleet.kill(1)
    fleet.orchestrator.cordon(fleet.pool.member(0), "admin")
    events = broadcast.events()
    kinds = [(await first(stream))[0] for stream in [messages(broadcast.stream(with_state=True))] for _ in range(4)]
    assert kinds == ["history", "lost", "drain", "state"]
    later = messages(broadcast.stream(events[0].id, with_state=True))
    assert [(await first(later))[0] for _ in range(3)] == ["history", "drain", "state"]


@pytest.mark.parametrize("has_admin_key", [True, False])
async def test_a_stream_says_whether_the_viewers_key_allows_changes(fleet: FakeFleet, has_admin_key: bool) -> None:
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/omni/fleet",
        "query_string": b"",
        "headers": [(b"accept", b"text/event-stream")],
        "client": ("127.0.0.1", 1),
    }
    client = Client(app_of(fleet, has_admin_key=has_admin_key, loopback=True), scope)
    client.upload(b"")
    await client.sent_so_far(2)
    client.disconnect()
    assert await client.status() == 200
    assert ("x-omni-may-change" in client.headers) == has_admin_key


async def test_a_quiet_stream_sends_comments(
    fleet: FakeFleet, broadcast: FleetBroadcast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: FleetView) -> dict[str, Any]:
        raise KeyError("at every state")

    monkeypatch.setattr(FleetView, "state", fails)
    for stream in (broadcast.stream(with_state=True), broadcast.stream()):
        async with aclosing(stream) as chunks:
            await first(chunks)
            assert [await first(chunks) for _ in range(2)] == [COMMENT] * 2


@pytest.mark.parametrize("when", ["before it begins", "while it waits"])
async def test_a_cancelled_producer_is_replaced(fleet: FakeFleet, broadcast: FleetBroadcast, when: str) -> None:
    async with aclosing(broadcast.stream(with_state=True)) as chunks:
        stream = messages(chunks)
        assert (await first(stream))[0] == "history"
        (producer,) = (task for task in asyncio.all_tasks() if task.get_name() == "omni-broadcast")
        if when == "while it waits":
            assert (await first(stream))[0] == "state"
        producer.cancel()
        await asyncio.wait([producer])
        assert [(await first(stream))[0] for _ in range(3)] == ["state"] * 3
        assert broadcast.is_producing


async def test_the_page_has_no_data_and_allows_no_other_script() -> None:
    async with client_of(app_of(None)) as client:
        page, script, style = [await client.get(f"/omni{part}") for part in ("", "/page.js", "/page.css")]
        refused = await client.get("/omni/fleet")
    assert [each.status_code for each in (page, script, style, refused)] == [200, 200, 200, 404]
    kinds = [each.headers["content-type"].partition(";")[0] for each in (page, script, style)]
    assert kinds == ["text/html", "text/javascript", "text/css"]
    for each in (page, script, style):
        policy = each.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert each.headers["x-content-type-options"] == "nosniff"
    assert re.findall(r"<script[^>]*>([^<]*)", page.text) == [""]
    assert re.search(r"\son\w+=|style=|https?:", page.text) is None


async def test_the_script_makes_no_markup_of_data_and_stores_no_key() -> None:
    async with client_of(app_of(None)) as client:
        script = (await client.get("/omni/page.js")).text
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Storage", "cookie"):
        assert word not in script
