"""What waits for a stage and in which order it is computed."""

from typing import Any

from vllm_omni_plugin.stages.turns import Turns
from vllm_omni_plugin.vllm_api.stage_protocol import StageRequest


def request(request_id: str, text: str = "", **fields: Any) -> StageRequest:
    return StageRequest(request_id, text=text, **fields)


def taken(turns: Turns, limit: int = 8) -> list[tuple[str, str | None, bool]]:
    """The next batch, finished at once."""
    batch = turns.take(limit)
    for session, _ in batch:
        turns.finish(session, failed=False)
    return [(session.request_id, job.input.text, job.last) for session, job in batch]


def test_first_come_first_served_and_one_chunk_of_a_session_per_batch() -> None:
    turns = Turns()
    turns.add(request("a", "1", resumable=True, last=False))
    turns.add(request("a", "2", resumable=True))
    turns.add(request("b", "3"))
    assert turns.waiting == 2
    assert taken(turns) == [("a", "1", False), ("b", "3", True)]
    assert taken(turns) == [("a", "2", True)]
    assert taken(turns) == []


def test_a_session_with_many_chunks_lets_others_in_between() -> None:
    turns = Turns()
    for text in "123":
        turns.add(request("a", text, resumable=True, last=False))
    turns.add(request("b", "x"))
    assert [taken(turns, limit=1)[0][1] for _ in range(4)] == ["1", "x", "2", "3"]


def test_nothing_is_left_of_what_has_ended() -> None:
    turns = Turns()
    turns.add(request("plain"))
    turns.add(request("session", resumable=True))
    turns.add(request("session", closing=True))
    turns.add(request("empty", closing=True))
    taken(turns)
    assert (turns.request_ids, turns.waiting) == ([], 0)


def test_a_session_ends_when_its_input_is_closed_after_its_last_turn() -> None:
    turns = Turns()
    turns.add(request("a", resumable=True))
    taken(turns)
    assert turns.request_ids == ["a"]
    turns.add(request("a", closing=True))
    assert turns.request_ids == []


def test_an_id_is_taken_twice_only_once_its_request_has_ended() -> None:
    turns = Turns()
    assert turns.add(request("a"))
    assert not turns.add(request("a"))
    taken(turns)
    assert turns.add(request("a"))


def test_what_is_computed_of_an_aborted_request_is_not_wanted_even_if_its_id_is_back() -> None:
    turns = Turns()
    turns.add(request("a", "old"))
    ((session, _),) = turns.take(1)
    assert turns.abort(["a", "unknown"]) == [session]
    turns.add(request("a", "new"))
    assert not turns.finish(session, failed=False)
    assert taken(turns) == [("a", "new", True)]


def test_an_aborted_request_that_waits_is_not_computed() -> None:
    turns = Turns()
    turns.add(request("a"))
    turns.add(request("b"))
    turns.abort(["a"])
    assert (turns.waiting, taken(turns)) == (1, [("b", "", True)])


def test_chunks_on_their_way_to_a_failed_session_begin_no_new_one() -> None:
    turns = Turns()
    turns.add(request("a", resumable=True))
    ((session, _),) = turns.take(1)
    assert turns.finish(session, failed=True)
    turns.add(request("a", resumable=True))
    assert turns.request_ids == []
