"""The client of one replica, over a link in memory."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi, FakeOutputs, FakeRequest
from tests.fakes.links import FakeLink
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.links.engine_client import EngineClient


class Peer:
    """A client, its link, and what it reported."""

    def __init__(self, grace: float = 0.0) -> None:
        self.link = FakeLink()
        self.outputs: list[FakeOutputs] = []
        self.deaths: list[str] = []
        self.fault: Exception | None = None
        self.client = EngineClient(self.link, FakeEngineApi(), 7, self._on_outputs, self.deaths.append, grace=grace)
        self.client.start()

    def _on_outputs(self, outputs: FakeOutputs) -> None:
        if self.fault is not None:
            raise self.fault
        self.outputs.append(outputs)

    async def open_call(self, method: str, *args: Any) -> asyncio.Task[Any]:
        before = len(self.link.calls)
        task = asyncio.create_task(self.client.call(method, *args))
        await asyncio.sleep(0)
        assert len(self.link.calls) == before + 1
        return task


@pytest.fixture
async def peer() -> Peer:
    return Peer()


async def test_replies_with_other_ids_are_ignored_and_a_refusal_is_an_error(peer: Peer) -> None:
    call = await peer.open_call("one")
    call_id = peer.link.calls[0][0]
    peer.link.answer(call_id + 100, "whose?")
    peer.link.refuse(call_id + 101)
    peer.link.answer(call_id, "mine")
    peer.link.answer(call_id, "again")
    assert await call == "mine"
    call = await peer.open_call("two")
    peer.link.refuse(peer.link.calls[1][0], "no such method")
    with pytest.raises(ReplicaError, match="no such method"):
        await call
    assert peer.deaths == []


@pytest.mark.parametrize("frame", [b"", b"\xff\xfe", b"[]", b'{"outputs": 3}', b'{"utility_output": {"call_id": 0}}'])
async def test_an_invalid_message_marks_the_replica_dead(peer: Peer, frame: bytes) -> None:
    call = await peer.open_call("one")
    call_id = peer.link.calls[0][0]
    peer.link.say(frame.replace(b"0", str(call_id).encode()))
    peer.link.report(1)
    assert (len(peer.deaths), peer.outputs) == (1, [])
    with pytest.raises(ReplicaError, match="replica 7 is gone: it"):
        await call


async def test_an_error_in_handling_outputs_marks_the_replica_dead(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.fault = RuntimeError("bug")
    peer.link.report(1)
    peer.fault = None
    peer.link.report(2)
    assert (peer.deaths, peer.outputs) == (["its outputs could not be handled: bug"], [])
    assert "Outputs of replica 7 could not be handled" in caplog.text


async def test_death_fails_open_calls_and_refuses_new_ones(peer: Peer) -> None:
    calls = [await peer.open_call("one"), await peer.open_call("two")]
    peer.link.say_dead()
    for call in calls:
        with pytest.raises(ReplicaError, match="replica 7 is gone: the engine reported its own death"):
            await call
    with pytest.raises(ReplicaError, match="reported its own death"):
        await peer.client.call("three")
    with pytest.raises(ReplicaError, match="reported its own death"):
        peer.client.add_request(FakeRequest("a"), "a-1")
    with pytest.raises(ReplicaError, match="reported its own death"):
        peer.client.abort_requests(["a-1"])
    assert (len(peer.link.calls), peer.link.added, peer.link.aborted) == (2, [], [])


async def test_on_dead_is_called_once_with_the_first_reason(peer: Peer) -> None:
    peer.client.mark_dead("first")
    peer.client.mark_dead("second")
    peer.link.say_dead()
    peer.client.close()
    peer.client.close()
    assert peer.deaths == ["first"]
    assert "first" in repr(peer.client)


async def test_a_reported_death_counts_after_the_grace_time() -> None:
    peer = Peer(grace=0.01)
    peer.link.say_dead()
    peer.link.say_dead()
    assert peer.deaths == []
    await eventually(lambda: peer.deaths)
    assert peer.deaths == ["the engine reported its own death"]


async def test_closing_the_client_cancels_the_grace_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    set_timer, timers = loop.call_later, []

    def call_later(delay: float, mark_dead: Callable[[], None]) -> asyncio.TimerHandle:
        timers.append(set_timer(delay, mark_dead))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", call_later)
    peer = Peer(grace=60.0)
    peer.link.say_dead()
    [timer] = timers
    assert not timer.cancelled()
    peer.client.close()
    assert timer.cancelled()
    assert peer.deaths == ["closed"]


async def test_a_failed_send_marks_the_replica_dead_in_the_loops_next_turn(peer: Peer) -> None:
    peer.link.broken = True
    for _ in range(2):
        with pytest.raises(ReplicaError, match="cannot send"):
            peer.client.add_request(FakeRequest("a"), "a-1")
        assert peer.deaths == []
    await asyncio.sleep(0)
    assert len(peer.deaths) == 1
    assert not peer.client.engine_failed


async def test_a_call_that_cannot_be_sent_leaves_no_unretrieved_error() -> None:
    unretrieved: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    peer = Peer()
    peer.link.broken = True
    with pytest.raises(ReplicaError, match="cannot send"):
        await peer.client.call("one")
    gc.collect()
    assert unretrieved == []


async def test_an_interruption_fails_calls_but_not_probes(peer: Peer) -> None:
    alive = asyncio.create_task(peer.client.probe())
    await asyncio.sleep(0)
    call = await peer.open_call("one")
    peer.client.interrupt("no answer for 10 s")
    with pytest.raises(ReplicaError, match="replica 7 hangs: no answer for 10 s"):
        await call
    peer.link.answer(peer.link.calls[0][0], False)
    await alive
    assert peer.deaths == []


async def test_an_engine_that_refuses_calls_during_its_shutdown_is_alive(
    peer: Peer,
) -> None:
    alive = asyncio.create_task(peer.client.probe())
    await asyncio.sleep(0)
    peer.link.refuse(peer.link.calls[0][0], "Server shutting down")
    await alive
    assert peer.deaths == []


async def test_outputs_between_an_interruption_and_the_reset_are_dropped(peer: Peer) -> None:
    peer.client.interrupt("no answer")
    peer.link.output("a")
    peer.link.report(3)
    reset = asyncio.create_task(peer.client.reset())
    await asyncio.sleep(0)
    assert peer.link.calls[-1][1] == "abort_requests"
    peer.link.answer(peer.link.calls[-1][0])
    await reset
    assert peer.outputs == []
    peer.link.report(4)
    assert [outputs.scheduler_stats for outputs in peer.outputs] == [4]


async def test_only_long_calls_make_an_engine_busy(peer: Peer) -> None:
    question, update = await peer.open_call("is_sleeping"), await peer.open_call("collective_rpc", "update_weights")
    assert peer.client.is_busy
    assert peer.link.calls[1][1:] == ("collective_rpc", ["update_weights"])
    peer.link.answer(peer.link.calls[1][0])
    await update
    assert not peer.client.is_busy
    peer.link.answer(peer.link.calls[0][0], False)
    await question
