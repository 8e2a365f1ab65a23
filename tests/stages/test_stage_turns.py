"""What waits for a stage and in which order it is computed."""

from typing import Any

from vllm_omni_plugin.stages.compute_queue import ComputeQueue
from vllm_omni_plugin.vllm_api.protocol.stage_protocol import StageRequest


def request(request_id: str, text: str = "", **fields: Any) -> StageRequest:
    return StageRequest(request_id, text=text, **fields)


def taken(queue: ComputeQueue, limit: int = 8) -> list[tuple[str, str | None, bool]]:
    """The next batch, finished at once."""
    batch = queue.take(limit)
    for session, _ in batch:
        queue.finish(session, failed=False)
    return [(session.request_id, job.input.text, job.last) for session, job in batch]


def test_first_come_first_served_and_one_chunk_of_a_session_per_batch() -> None:
    queue = ComputeQueue()
    queue.add(request("a", "1", resumable=True, last=False))
    queue.add(request("a", "2", resumable=True))
    queue.add(request("b", "3"))
    assert queue.waiting == 2
    assert taken(queue) == [("a", "1", False), ("b", "3", True)]
    assert taken(queue) == [("a", "2", True)]
    assert taken(queue) == []


def test_a_session_with_many_chunks_lets_others_in_between() -> None:
    queue = ComputeQueue()
    for text in "123":
        queue.add(request("a", text, resumable=True, last=False))
    queue.add(request("b", "x"))
    assert [taken(queue, limit=1)[0][1] for _ in range(4)] == ["1", "x", "2", "3"]


def test_nothing_is_left_of_what_has_ended() -> None:
    queue = ComputeQueue()
    queue.add(request("plain"))
    queue.add(request("session", resumable=True))
    queue.add(request("session", closing=True))
    queue.add(request("empty", closing=True))
    taken(queue)
    assert (queue.request_ids, queue.waiting) == ([], 0)


def test_a_session_ends_when_its_input_is_closed_after_its_last_turn() -> None:
    queue = ComputeQueue()
    queue.add(request("a", resumable=True))
    taken(queue)
    assert queue.request_ids == ["a"]
    queue.add(request("a", closing=True))
    assert queue.request_ids == []


def test_an_id_is_taken_twice_only_once_its_request_has_ended() -> None:
    queue = ComputeQueue()
    assert queue.add(request("a"))
    assert not queue.add(request("a"))
    taken(queue)
    assert queue.add(request("a"))


def test_what_is_computed_of_an_aborted_request_is_not_wanted_even_if_its_id_is_back() -> None:
    queue = ComputeQueue()
    queue.add(request("a", "old"))
    ((session, _),) = queue.take(1)
    assert queue.abort(["a", "unknown"]) == [session]
    queue.add(request("a", "new"))
    assert not queue.finish(session, failed=False)
    assert taken(queue) == [("a", "new", True)]


def test_an_aborted_request_that_waits_is_not_computed() -> None:
    queue = ComputeQueue()
    queue.add(request("a"))
    queue.add(request("b"))
    queue.abort(["a"])
    assert (queue.waiting, taken(queue)) == (1, [("b", "", True)])


def test_chunks_on_their_way_to_a_failed_session_begin_no_new_one() -> None:
    queue = ComputeQueue()
    queue.add(request("a", resumable=True))
    ((session, _),) = queue.take(1)
    assert queue.finish(session, failed=True)
    queue.add(request("a", resumable=True))
    assert queue.request_ids == []
