"""The order in which a stage computes its inputs."""

from typing import Any

from vllm_omni_plugin.stages.compute_queue import ComputeQueue
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import StageRequest


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
