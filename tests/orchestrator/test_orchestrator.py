"""Requests to replicas, outputs back, and what happens when replicas are lost."""

from typing import Any

import msgspec
import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeOutput, FakeOutputs
from tests.fakes.fleet import FakeFleet
from tests.fakes.observations import observed
from vllm_omni_plugin.errors import MessageTooLargeError, OmniError
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError


async def test_two_heads_never_use_the_same_id() -> None:
    async with FakeFleet() as one, FakeFleet() as other:
        await one.submit("a")
        await other.submit("a")
        assert one.attempt("a")[1] != other.attempt("a")[1]


async def test_an_abort_that_cannot_be_sent_keeps_no_other_request_from_being_aborted(fleet: FakeFleet) -> None:
    await fleet.submit("a")
    await fleet.submit("b")
    (broken, _), (link, attempt) = fleet.attempt("a"), fleet.attempt("b")
    broken.broken = True
    await fleet.abort("a", "b")
    assert (fleet.in_flight, link.aborted) == ([0, 0], [attempt])


async def test_a_request_that_another_head_left_behind_is_aborted(fleet: FakeFleet) -> None:
    await fleet.submit("a")
    link, attempt = fleet.attempt("a")
    await fleet.abort("a")
    link.output(attempt)
    link.output("another head's")
    link.output("one that has ended", finish_reason="stop")
    assert link.aborted == [attempt, "another head's"]
    link.broken = True
    link.output("another head's")
    await eventually(lambda: len(fleet.pool.serving) == 1, "the loss")


async def test_a_request_under_an_id_in_use_takes_its_place(fleet: FakeFleet) -> None:
    await fleet.submit("a")
    old_link, old_attempt = fleet.attempt("a")
    await fleet.submit("a")
    link, attempt = fleet.attempt("a")
    assert attempt != old_attempt
    assert old_link.aborted == [old_attempt]
    assert sum(fleet.in_flight) == 1
    old_link.output(old_attempt, finish_reason="abort")
    link.output(attempt, finish_reason="stop")
    assert await fleet.read() == [("a", "stop")]


@pytest.mark.parametrize("too_large", [False, True], ids=["cannot be encoded", "too large for its replica"])
async def test_a_request_that_cannot_be_sent_fails_alone(fleet: FakeFleet, too_large: bool) -> None:
    await fleet.submit("good")
    for link in fleet.links.values():
        link.too_large = too_large
    await fleet.submit("bad", sampling_params=None if too_large else object())
    error = await fleet.the_error("bad")
    assert isinstance(error, MessageTooLargeError if too_large else OmniError)
    assert too_large or "could not be encoded" in str(error)
    assert sum(fleet.in_flight) == 1
    assert len(fleet.pool.serving) == 2


async def test_replicas_found_dead_by_the_send_do_not_count_for_the_limit() -> None:
    """A node with eight replicas is gone at once, and one request finds that out of each of them."""
    async with FakeFleet(replicas=9, migration_limit=1) as fleet:
        await fleet.submit("a", affinity=0)
        for replica_id in range(8):
            fleet.links[replica_id].broken = True
        fleet.kill(0)
        await eventually(lambda: fleet.in_flight == [0] * 8 + [1], "the losses")
        assert await fleet.read() == []
        # That one is the first that has got it since.
        fleet.join(fleet.pool.member(0))
        fleet.kill(8)
        assert "moved 1 times" in str(await fleet.the_error("a"))


async def test_the_time_until_the_first_send_is_observed_once_per_request(fleet: FakeFleet) -> None:
    await fleet.submit("a")
    fleet.now = 5.0
    fleet.attempt("a")[0].say_dead()
    assert observed(fleet.orchestrator.metrics.queue_time_seconds) == (1, 0.0)


@pytest.mark.parametrize("closed_with_turn", [True, False])
async def test_a_session_stays_on_its_replica_under_one_id_until_it_is_closed_and_its_last_turn_has_ended(
    fleet: FakeFleet, closed_with_turn: bool
) -> None:
    await fleet.submit("s", resumable=True)
    link, attempt = fleet.attempt("s")
    link.output(attempt, finish_reason="stop")
    await fleet.submit("s", resumable=True)
    assert sum(fleet.in_flight) == 1
    for close in (closed_with_turn, not closed_with_turn):
        if close:
            await fleet.submit("s", resumable=False)
        else:
            link.output(attempt, finish_reason="stop")
    assert link.added == [attempt] * 3
    assert await fleet.read() == [("s", "stop"), ("s", "stop")]
    assert (fleet.in_flight, fleet.orchestrator.request_states) == ([0, 0], {})


async def test_a_chunk_that_cannot_be_encoded_ends_the_session_on_both_sides(fleet: FakeFleet) -> None:
    await fleet.submit("s", resumable=True)
    link, attempt = fleet.attempt("s")
    await fleet.submit("s", resumable=True, sampling_params=object())
    error = await fleet.the_error("s")
    assert "could not be encoded" in str(error)
    assert link.aborted == [attempt]
    assert fleet.in_flight == [0, 0]


async def test_a_report_counts_without_what_finished_in_the_same_message(fleet: FakeFleet) -> None:
    """vllm#48027: of one message, the end of a request is heeded before the report, which no longer has it."""
    for name in "ab":
        await fleet.submit(name, affinity=0)
    fleet.say("a", finish_reason="stop", running=3)
    load = fleet.pool.member(0).load
    # One of ours is left, and two of another head's.
    assert (load.requests, load.others) == (3, 2)


async def test_the_load_is_exact_after_a_message_with_the_first_the_middle_and_the_last_output_of_requests(
    fleet: FakeFleet,
) -> None:
    for name in "abc":
        await fleet.submit(name, affinity=0, prompt=[1, 2, 3])
    fleet.say("a", 7)
    fleet.say("b", 7)
    link, _ = fleet.attempt("a")
    said = [("a", [8, 9], None), ("b", [8, 9], None), ("b", [6], "stop"), ("c", [7], None)]
    outputs = [FakeOutput(fleet.attempt(name)[1], tokens, reason, name == "c") for name, tokens, reason in said]
    link.say(msgspec.json.encode(FakeOutputs(outputs=outputs)))
    ledger = fleet.pool.member(0).ledger
    assert (ledger.load.requests, ledger.load.decode_tokens, ledger.generated) == (2, (3 + 3) + (3 + 1), 8)


async def test_a_closed_orchestrator_refuses_and_survives_late_outputs() -> None:
    async with FakeFleet() as fleet:
        await fleet.submit("a")
        link, attempt = fleet.attempt("a")
    link.output(attempt, finish_reason="stop")
    fleet.orchestrator.close_queues()
    queues: list[Any] = [fleet.orchestrator.front_end.request_async_queue, fleet.orchestrator.rpc_async_queue]
    for queue in queues:
        with pytest.raises(QueueClosedError):
            queue.put(None)


@pytest.mark.parametrize("ends", ["in a message", "by an abort"])
async def test_gauges_of_a_shared_engine_are_0_while_this_head_has_no_request_there(ends: str) -> None:
    """Its reports go to one head at a time: none may come that corrects the last one."""
    async with FakeFleet(replicas=1) as fleet:
        fleet.pool.member(0).remote = True
        queue = fleet.orchestrator.front_end.output_async_queue

        async def reported() -> tuple[int, int]:
            await eventually(lambda: len(queue) > 0, "a report")
            await fleet.read()
            return fleet.statistics[-1]

        await fleet.submit("a")
        link, attempt = fleet.attempt("a")
        link.output(attempt, running=3)
        assert await reported() == (0, 3)
        if ends == "by an abort":
            await fleet.abort("a")
        else:
            link.output(attempt, finish_reason="stop", running=2)
        assert await reported() == (0, 0)
        link.report(running=2)
        assert await reported() == (0, 0)
