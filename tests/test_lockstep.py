"""Processes of a lockstep group: they start together and end together."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.fakes.engines import FakeProcess
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.vllm_api.launch.lockstep import GroupIncarnation, StartBarrier

SOON_S = 10.0


class Undying(FakeProcess):
    """A process that cannot be killed."""

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def group(
    helper_exits: Callable[[], None] = lambda: None,
) -> tuple[GroupIncarnation, FakeProcess, FakeProcess, FakeProcess]:
    incarnation = GroupIncarnation(2)
    one, other, helper = map(FakeProcess, range(3))
    incarnation.add(one)
    incarnation.add(other)
    incarnation.add(helper, helper_exits)
    return incarnation, one, other, helper


def test_ranks_that_all_leave_shut_down_and_then_the_helper(threads: ThreadPoolExecutor) -> None:
    told = threading.Event()
    incarnation, one, other, helper = group(told.set)
    leaving = threads.submit(incarnation.leave, 0, None)
    assert not leaving.done()
    incarnation.leave(1, None)
    leaving.result(SOON_S)
    one.die()
    incarnation.close(one)
    assert not other.ended
    assert not helper.ended
    other.die()
    incarnation.close(other)
    assert helper.ended
    assert told.wait(SOON_S)


def test_a_rank_that_leaves_alone_waits_until_its_timeout() -> None:
    incarnation, one, other, helper = group()
    incarnation.leave(0, 0.01)
    assert not one.ended
    incarnation.end()
    assert other.ended
    assert helper.ended


def test_a_process_added_to_an_ended_incarnation_is_killed() -> None:
    incarnation = GroupIncarnation(2)
    incarnation.end()
    late = FakeProcess(0)
    with pytest.raises(ReplicaError, match="another process of its group ended"):
        incarnation.add(late)
    assert late.killed


def test_a_process_that_cannot_be_killed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni_plugin.vllm_api.launch.lockstep.RANKS_EXIT_TIMEOUT_S", 0.0)
    incarnation, undying = GroupIncarnation(1), Undying(0)
    incarnation.add(undying)
    incarnation.end()
    with pytest.raises(ReplicaError, match="does not exit"):
        incarnation.join()
    undying.die()


def wait(threads: ThreadPoolExecutor, barrier: StartBarrier, rank: int) -> "Future[GroupIncarnation]":
    return threads.submit(barrier.wait, rank, threading.Event())


def test_a_cancelled_rank_stops_waiting_and_may_start_again(threads: ThreadPoolExecutor) -> None:
    barrier = StartBarrier(2, lambda: GroupIncarnation(2), SOON_S)
    cancelled = threading.Event()
    one = threads.submit(barrier.wait, 0, cancelled)
    barrier.cancel(cancelled)
    with pytest.raises(ReplicaError, match="was cancelled"):
        one.result(SOON_S)
    again, other = wait(threads, barrier, 0), wait(threads, barrier, 1)
    assert again.result(SOON_S) is other.result(SOON_S)


def test_no_incarnation_begins_beside_processes_that_do_not_end(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni_plugin.vllm_api.launch.lockstep.RANKS_EXIT_TIMEOUT_S", 0.0)
    barrier = StartBarrier(2, lambda: GroupIncarnation(2), SOON_S)
    first = [wait(threads, barrier, rank) for rank in (0, 1)]
    undying = Undying(0)
    first[1].result(SOON_S).add(undying)
    with pytest.raises(ReplicaError, match="does not exit"):
        wait(threads, barrier, 0).result(SOON_S)
    undying.die()
