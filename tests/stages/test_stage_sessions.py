"""Sessions and turns: chunks of one input are answered in order and share a memory."""

from typing import Any

from tests.stages.heads import Head, open_head, stage
from vllm_omni_plugin.pipeline import StageInput
from vllm_omni_plugin.stages.compute_queue import ComputeQueue
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import StageRequest


def chunk(*tokens: int) -> StageInput:
    return StageInput(token_ids=tokens)


def texts(answers: list[object]) -> list[str]:
    return [answer.text for answer in answers]  # type: ignore[attr-defined]


def send_whole(head: Head, request_id: str) -> None:
    head.send(request_id, chunk(1), resumable=True, last=False)
    head.send(request_id, chunk(2), resumable=True, last=False)
    head.send(request_id, chunk(3), resumable=True, last=True)
    head.close_input(request_id)


async def test_chunks_are_answered_in_order_with_one_memory_and_numbered() -> None:
    async with open_head(stage("classes:Counting")) as head:
        send_whole(head, "a")
        send_whole(head, "b")
        for request_id in ("a", "b"):
            assert texts(await head.answers(request_id, 3)) == ["1", "3", "6 in all"]
            assert head.numbers(request_id) == [[0], [1], [2]]
        assert {str(output.finish_reason) for output in head.outputs} == {"stop"}


async def test_a_session_is_open_until_it_is_closed_or_aborted_and_then_its_id_begins_anew() -> None:
    async with open_head(stage("classes:Counting")) as head:
        for number in range(3):
            head.send("closed", chunk(1), resumable=True, last=False)
            assert texts(await head.answers("closed", number + 1))[-1] == f"{number + 1}"
        head.close_input("closed")
        head.send("closed", chunk(5))
        assert texts(await head.answers("closed", 4))[-1] == "5 in all"
        assert head.numbers("closed") == [[0], [1], [2], [0]]
        head.send("by content", chunk(1), resumable=True, last=False)
        head.send("by content", chunk(2))
        assert texts(await head.answers("by content", 2)) == ["1", "3 in all"]
        head.send("aborted", chunk(1), resumable=True, last=False)
        await head.answers("aborted")
        head.client.abort_requests(["aborted"])
        head.close_input("aborted")
        head.send("aborted", chunk(7))
        assert texts(await head.answers("aborted", 2)) == ["1", "7 in all"]


async def test_a_failed_chunk_ends_its_session_and_further_chunks_are_dropped() -> None:
    async with open_head(stage("classes:Counting")) as head:
        head.send("a", chunk(1), resumable=True, last=False)
        head.send("a", "fail", resumable=True, last=False)
        head.send("a", chunk(2), resumable=True, last=False)
        answers = await head.answers("a", 2)
        assert (answers[0].text, answers[1].finish_reason) == ("1", "error")
        head.send("a", chunk(3), resumable=True, last=True)
        head.close_input("a")
        await head.client.call("abort_requests", [])
        head.send("b", chunk(4))
        assert (await head.answer("b")).text == "4 in all"
        assert len(await head.answers("a")) == 2


def request(request_id: str, text: str = "", **fields: Any) -> StageRequest:
    return StageRequest(request_id, text=text, **fields)


def taken(queue: ComputeQueue, limit: int = 8) -> list[tuple[str, str | None, bool]]:
    """Take the next batch and finish it."""
    batch = queue.take(limit)
    for session, _ in batch:
        queue.finish(session, failed=False)
    return [(session.request_id, job.input.text, job.last) for session, job in batch]


def test_a_session_with_many_chunks_lets_others_in_between() -> None:
    queue = ComputeQueue()
    for text in "123":
        queue.add(request("a", text, resumable=True, last=False))
    queue.add(request("b", "x"))
    assert [taken(queue, limit=1)[0][1] for _ in range(4)] == ["1", "x", "2", "3"]


def test_no_state_is_left_of_ended_sessions() -> None:
    queue = ComputeQueue()
    queue.add(request("plain"))
    queue.add(request("session", resumable=True))
    queue.add(request("session", closing=True))
    queue.add(request("empty", closing=True))
    taken(queue)
    assert (queue.request_ids, queue.waiting) == ([], 0)


def test_an_id_is_taken_twice_only_once_its_request_has_ended() -> None:
    queue = ComputeQueue()
    assert queue.add(request("a"))
    assert not queue.add(request("a"))
    taken(queue)
    assert queue.add(request("a"))


def test_the_result_of_an_aborted_request_is_dropped_even_if_its_id_is_used_again() -> None:
    queue = ComputeQueue()
    queue.add(request("a", "old"))
    ((session, _),) = queue.take(1)
    assert queue.abort(["a", "unknown"]) == [session]
    queue.add(request("a", "new"))
    assert not queue.finish(session, failed=False)
    assert taken(queue) == [("a", "new", True)]
