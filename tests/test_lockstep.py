"""Processes of a lockstep group: meeting, living and dying together."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.fakes.engines import FakeProcess
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.vllm_api.launch.lockstep import Generation, Meeting

SOON_S = 10.0


class Undying(FakeProcess):
    """A process that hangs in the kernel."""

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def group(helper_exits: Callable[[], None] = lambda: None) -> tuple[Generation, FakeProcess, FakeProcess, FakeProcess]:
    """Two ranks and a helper."""
    generation = Generation(2)
    one, other, helper = map(FakeProcess, range(3))
    generation.add(one)
    generation.add(other)
    generation.add(helper, helper_exits)
    return generation, one, other, helper


def test_ranks_that_all_leave_end_in_order_and_the_helper_after_them(threads: ThreadPoolExecutor) -> None:
    told = threading.Event()
    generation, one, other, helper = group(told.set)
    leaving = threads.submit(generation.leave, 0, None)
    assert not leaving.done()
    generation.leave(1, None)
    leaving.result(SOON_S)
    one.die()
    generation.close(one)
    assert not other.ended
    assert not helper.ended
    other.die()
    generation.close(other)
    assert helper.ended
    assert told.wait(SOON_S)


def test_leaving_alone_takes_no_longer_than_it_may() -> None:
    generation, one, other, helper = group()
    generation.leave(0, 0.01)
    assert not one.ended
    generation.end()
    assert other.ended
    assert helper.ended


def test_who_comes_to_an_ended_generation_is_killed() -> None:
    generation = Generation(2)
    generation.end()
    late = FakeProcess(0)
    with pytest.raises(ReplicaError, match="another process of its group ended"):
        generation.add(late)
    assert late.killed


def test_what_cannot_be_killed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni_plugin.vllm_api.launch.lockstep._DEATH_TAKES_AT_MOST_S", 0.0)
    generation, undying = Generation(1), Undying(0)
    generation.add(undying)
    generation.end()
    with pytest.raises(ReplicaError, match="cannot be ended"):
        generation.join()
    undying.die()


def attend(threads: ThreadPoolExecutor, meeting: Meeting, rank: int) -> "Attendance":
    given_up = threading.Event()
    return Attendance(threads.submit(meeting.attend, rank, given_up), given_up)


class Attendance:
    """One rank on its way to a generation."""

    def __init__(self, future: "Future[Generation]", given_up: threading.Event) -> None:
        self.future = future
        self.given_up = given_up

    def generation(self) -> Generation:
        return self.future.result(SOON_S)


def two_ranks(patience: float = SOON_S) -> Meeting:
    return Meeting(2, lambda: Generation(2), patience)


def test_a_rank_that_is_given_up_waits_no_longer_and_may_come_again(threads: ThreadPoolExecutor) -> None:
    meeting = two_ranks()
    one = attend(threads, meeting, 0)
    meeting.give_up(one.given_up)
    with pytest.raises(ReplicaError, match="given up"):
        one.generation()
    again, other = attend(threads, meeting, 0), attend(threads, meeting, 1)
    assert again.generation() is other.generation()


def test_a_rank_whose_siblings_do_not_come_is_released(threads: ThreadPoolExecutor) -> None:
    lonely = attend(threads, Meeting(3, lambda: Generation(3), patience=0.01), 1)
    with pytest.raises(ReplicaError, match="the other ranks of its group do not start: 0, 2"):
        lonely.generation()


def test_no_generation_begins_beside_processes_that_do_not_end(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni_plugin.vllm_api.launch.lockstep._DEATH_TAKES_AT_MOST_S", 0.0)
    meeting = two_ranks()
    first = [attend(threads, meeting, rank) for rank in (0, 1)]
    undying = Undying(0)
    first[1].generation().add(undying)
    with pytest.raises(ReplicaError, match="cannot be ended"):
        attend(threads, meeting, 0).generation()
    undying.die()
