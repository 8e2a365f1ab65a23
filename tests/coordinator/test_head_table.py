"""Seats, numbers of replicas and lists, without sockets."""

import itertools
from collections.abc import Iterator

import pytest
from coordinator_support import make_event
from head_world import World, rows

from vllm_omni_plugin.coordinator import (
    PeerAnswer,
    ReplicaEvent,
    ReplicaKey,
    ReplicaStatus,
    ReplicaWork,
    engine_key,
)
from vllm_omni_plugin.coordinator.editions import ListEditions
from vllm_omni_plugin.coordinator.head_messages import SEAT_PROTOCOL, Beat, ReplicaNumber, Work
from vllm_omni_plugin.coordinator.head_table import HEAD_TIMEOUT, MAX_HEADS
from vllm_omni_plugin.coordinator.head_wire import encode_from_head
from vllm_omni_plugin.coordinator.membership import MembershipTable, TableFullError
from vllm_omni_plugin.coordinator.numbering import Numbering
from vllm_omni_plugin.coordinator.pending_calls import NoSeatError
from vllm_omni_plugin.coordinator.seat import MAX_WORK_ROWS, Seat
from vllm_omni_plugin.errors import WireError


def key(name: str, stage_id: int = 0) -> ReplicaKey:
    return ReplicaKey(stage_id, f"tcp://{name}:1", f"tcp://{name}:2")


def number(name: str, replica_id: int) -> ReplicaNumber:
    return ReplicaNumber(*key(name), replica_id)


def work(name: str = "a", requests: int = 1) -> ReplicaWork:
    return ReplicaWork(engine_key(*key(name), 0), requests, 10 * requests)


def beat(head_id: str, seat: int, anew: bool = True) -> Beat:
    return Beat(head_id, seat, 0, anew, SEAT_PROTOCOL)


@pytest.fixture
def world() -> Iterator[World]:
    """Three heads that know each other."""
    world = World()
    for name in ("h1", "h2", "h3"):
        world.connect(name)
    world.settle()
    yield world
    assert not any(head.dropped for head in world.heads.values())


def test_all_heads_name_a_start_of_a_replica_alike_and_every_other_one_differently() -> None:
    engines = list(itertools.product(range(3), "ab", "ab", range(50)))
    assert len({engine_key(*engine) for engine in engines}) == len(engines)
    # Computed by each head for itself: it may not depend on the process.
    assert engine_key(0, "tcp://10.0.0.1:40001", "tcp://10.0.0.1:40002", 7) == 5802032172893674


def test_lowest_free_number_of_the_stage_is_given_and_kept() -> None:
    numbering = Numbering()
    assert [numbering.number_of(key(name)) for name in "abca"] == [0, 1, 2, 0]
    assert numbering.number_of(key("x", stage_id=1)) == 0
    numbering.release(key("b"))
    numbering.release(key("unknown"))
    assert [numbering.number_of(key(name)) for name in "de"] == [1, 3]


def test_reserved_numbers_wait_for_their_replicas_until_the_end_of_reservations() -> None:
    numbering = Numbering()
    numbering.reserve([number("b", 0), number("a", 5), number("thief", 5), number("b", 9)])
    assert [numbering.number_of(key(name)) for name in "axb"] == [5, 1, 0]
    numbering.reserve([number("gone", 2), number("x", 7), number("late", 5)])
    numbering.end_reservations()
    assert [numbering.number_of(key(name)) for name in ("y", "late", "x")] == [2, 3, 1]


def test_numbers_of_the_heads_own_engines_are_given_to_nobody() -> None:
    numbering = Numbering({0: 2})
    numbering.reserve([number("a", 1), number("b", 3)])
    assert [numbering.number_of(key(name)) for name in "abc"] == [2, 3, 4]
    assert numbering.number_of(key("x", stage_id=1)) == 0
    numbering.release(key("a"))
    numbering.reserve([number("d", 7)])
    numbering.end_reservations()
    assert numbering.number_of(key("e")) == 2


def test_number_of_a_row_that_was_displaced_is_free_again() -> None:
    table, numbering = MembershipTable(10.0, max_replicas=1), Numbering()
    editions = ListEditions(table, numbering)

    def announce(event: ReplicaEvent) -> None:
        change = table.apply(event, 0.0)
        assert change is not None
        editions.note([change])
        editions.revise(0.0, 0.0)

    announce(make_event("a"))
    announce(make_event("a", status=ReplicaStatus.DOWN))
    assert numbering.number_of(key("a", stage_id=make_event("a").stage_id)) == 0
    announce(make_event("b"))
    assert numbering.number_of(key("b", stage_id=make_event("b").stage_id)) == 0


def test_replica_keeps_its_number_when_it_comes_back_and_when_the_coordinator_does(world: World) -> None:
    for name in "abc":
        world.announce(make_event(name))
    world.settle()
    numbers = {row[0]: row[5] for row in rows(world.heads["h1"].lists[-1])}
    world.announce(make_event("b", status=ReplicaStatus.DOWN))
    world.settle()
    world.announce(make_event("b", incarnation=5))
    world.settle()
    assert {row[0]: row[5] for row in rows(world.heads["h1"].lists[-1])} == numbers

    world.restart()
    world.exchange("h1", "h2", "h3")
    for name in "xcba":
        world.announce(make_event(name))
    world.settle()
    found = {row[0]: row[5] for row in rows(world.heads["h2"].lists[-1])}
    assert found == {**numbers, "tcp://x:1": 3}


def test_first_list_comes_whole_then_only_what_changed(world: World) -> None:
    for name in "abcdefgh":
        world.announce(make_event(name))
    world.tick()
    (whole,) = world.heads["h1"].down
    world.exchange("h1")
    world.announce(make_event("a", status=ReplicaStatus.DRAINING))
    world.tick()
    (delta,) = world.heads["h1"].down
    assert len(delta) < len(whole) / 4
    world.exchange("h1")
    assert [len(replicas.replicas) for replicas in world.heads["h1"].lists] == [0, 8, 7]
    assert [row.input_addr for row in world.heads["h1"].lists[-1].no_new_work] == ["tcp://a:1"]


def test_heartbeats_alone_make_no_list(world: World) -> None:
    world.announce(make_event("a"))
    world.tick()
    world.exchange("h1")
    for _ in range(5):
        world.announce(make_event("a"))
        world.tick()
    assert not world.heads["h1"].down


def test_lost_delta_is_healed_by_the_next_message(world: World) -> None:
    head = world.heads["h1"]
    for name in "abc":
        world.announce(make_event(name))
        world.tick()
        if name == "b":
            head.down.pop()
        world.exchange("h1")
    assert rows(head.lists[-1]) == rows(world.listed())


def test_a_head_that_has_missed_a_delivery_is_told_so_since_it_may_have_been_a_call(world: World) -> None:
    head = world.heads["h1"]
    assert head.seats == 1
    asking = world.heads["h2"].session.call("greet", None, world.now + 1.0)
    world.exchange("h2")
    head.down.pop()
    world.announce(make_event("a"))
    world.tick()
    world.exchange("h1", "h2")
    assert not asking.done()
    assert head.seats == 2


def test_report_reaches_the_other_heads_and_not_its_own(world: World) -> None:
    world.report("h1", work())
    world.exchange("h1")
    world.tick()
    world.exchange("h1", "h2", "h3")
    assert world.heads["h2"].others["h1"] == world.heads["h3"].others["h1"] == {engine_key(*key("a"), 0): work()}
    assert "h1" not in world.heads["h1"].others


def test_reports_of_one_interval_share_a_delivery_with_the_last_of_each_replica(world: World) -> None:
    for requests in (1, 2, 3):
        world.report("h1", work("a", requests))
        world.report("h3", work("b", requests))
    world.exchange("h1", "h3")
    world.tick()
    assert len(world.heads["h2"].down) == 1
    world.exchange("h2")
    assert world.heads["h2"].others["h1"] == {engine_key(*key("a"), 0): work("a", 3)}


def test_lost_report_is_asked_for_in_full(world: World) -> None:
    world.report("h1", work("a"))
    world.heads["h1"].session.frames.popleft()
    world.report("h1", work("b"))
    world.exchange("h1")
    world.tick()
    world.exchange("h2")
    assert set(world.heads["h2"].others["h1"]) == {engine_key(*key(name), 0) for name in "ab"}
    assert world.heads["h1"].seats == 1, "nothing that others said was lost"


def test_lost_last_report_is_noticed_by_the_next_beat(world: World) -> None:
    world.report("h1", work("a"))
    world.heads["h1"].session.frames.popleft()
    world.heads["h1"].session.beat()
    world.exchange("h1")
    world.tick()
    world.exchange("h2")
    assert set(world.heads["h2"].others["h1"]) == {engine_key(*key("a"), 0)}


def test_silent_head_has_left(world: World) -> None:
    world.report("h1", work())
    world.settle()
    for _ in range(6):
        world.tick(HEAD_TIMEOUT / 5)
        for name in ("h2", "h3"):
            world.heads[name].session.beat()
            world.exchange(name)
    assert "h1" not in world.heads["h2"].others
    assert "h1" not in world.heads["h3"].others


def test_head_whose_connection_broke_has_left_with_the_next_word_for_it(world: World) -> None:
    world.report("h1", work())
    world.settle()
    del world.heads["h1"]
    world.announce(make_event("a"))
    world.tick(0.1)
    world.exchange("h2")
    assert "h1" not in world.heads["h2"].others


def test_coordinator_that_was_late_itself_lets_nobody_go(world: World) -> None:
    world.now += 100.0
    assert not world.coordinator.heads.expire(world.now, late_by=100.0)
    assert len(world.coordinator.heads) == 3


def test_older_connection_of_a_head_does_not_take_the_seat_back(world: World) -> None:
    heads = world.coordinator.heads
    assert heads.beat(b"new", beat("h1", 10**9), world.now)
    assert heads.beat(b"old", beat("h1", 10**9 - 1), world.now) is None
    assert heads.beat(b"other", beat("h1", 10**9), world.now) is None
    assert heads.work(b"old", Work(1, True, [work()])) is None


def test_connection_with_a_seat_cannot_take_another(world: World) -> None:
    peer = world.heads["h1"].peer
    assert world.coordinator.heads.beat(peer, beat("h2", 10**9), world.now) is None
    assert world.coordinator.heads.beat(peer, beat("h9", 10**9), world.now) is None


def test_seats_are_bounded(world: World) -> None:
    heads = world.coordinator.heads
    for count in range(MAX_HEADS - len(heads)):
        assert heads.beat(b"p%d" % count, beat(f"x{count}", 1), world.now)
    with pytest.raises(TableFullError, match="64 heads"):
        heads.beat(b"one too many", beat("one too many", 1), world.now)
    assert heads.beat(world.heads["h1"].peer, beat("h1", 10**6, anew=False), world.now)


def test_a_head_without_a_seat_is_told_why_until_there_is_one(world: World) -> None:
    world.coordinator.heads.beat(b"elsewhere", beat("h9", 1), world.now)
    for count in range(MAX_HEADS - len(world.coordinator.heads)):
        world.coordinator.heads.beat(b"p%d" % count, beat(f"x{count}", 1), world.now)
    late = world.connect("late")
    with pytest.raises(TableFullError):
        world.exchange("late")
    world.exchange("late")
    assert late.refusals == ["there are 64 heads already"]
    world.coordinator.heads.leave(b"elsewhere")
    late.session.beat()
    world.exchange("late")
    assert late.refusals == []
    assert late.lists


@pytest.mark.parametrize("protocol", [0, SEAT_PROTOCOL + 1])
def test_a_head_of_another_version_gets_no_seat_and_is_told_what_to_do(world: World, protocol: int) -> None:
    stranger = world.connect("stranger")
    stranger.session.frames.clear()
    stranger.up.append(encode_from_head(Beat("stranger", 1, 0, True, protocol)))
    with pytest.raises(WireError, match="same version of vllm-omni-plugin"):
        world.exchange("stranger")
    assert len(world.coordinator.heads) == 3
    world.exchange("stranger")
    (refusal,) = stranger.refusals
    assert f"head stranger speaks version {protocol} and the coordinator version {SEAT_PROTOCOL}" in refusal


def test_being_told_everything_again_and_again_is_limited(world: World) -> None:
    head = world.heads["h1"]
    told = [world.coordinator.heads.beat(head.peer, beat("h1", 10**6), world.now) for _ in range(100)]
    assert sum(len(frame) for letters in told[1:] if letters for _, frame in letters) < 100 * 150


def test_work_of_one_head_is_bounded() -> None:
    seat = Seat("h", b"p", 1, 0.0)
    assert seat.report(Work(1, True, []))
    for sequence in range(2, 100):
        rows_of_frame = [work(f"r{sequence}-{number}") for number in range(400)]
        if not seat.report(Work(sequence, False, rows_of_frame)):
            break
    assert len(seat.all_work().work) <= MAX_WORK_ROWS
    assert sequence < 30
    assert not seat.report(Work(sequence + 1, False, []))
    assert seat.report(Work(sequence + 2, True, [work()]))
    assert seat.all_work().work == [work()]


def test_call_gets_one_answer_of_each_other_head(world: World) -> None:
    future = world.heads["h1"].session.call("greet", {"name": "x"}, deadline=world.now + 5)
    world.exchange("h1", "h2", "h3")
    for name in ("h2", "h3"):
        (call,) = world.heads[name].calls
        assert (call.head_id, call.method, call.arguments) == ("h1", "greet", {"name": "x"})
        world.heads[name].session.answer(call, [name], "" if name == "h2" else "no")
        assert not future.done()
        world.exchange("h1", "h2", "h3")
    assert future.result(0) == [PeerAnswer("h2", ["h2"]), PeerAnswer("h3", ["h3"], "no")]


def test_head_that_leaves_or_is_too_slow_answers_with_an_error(world: World) -> None:
    caller = world.heads["h1"]
    future = caller.session.call("greet", None, deadline=world.now + 1)
    world.exchange("h1", "h2", "h3")
    world.heads["h2"].session.leave()
    world.exchange("h1", "h2")
    caller.hear(caller.session.watch(world.now + 0.9, 10**6))
    assert not future.done()
    caller.hear(caller.session.watch(world.now + 1.0, 10**6))
    answers = {answer.head_id: answer.error for answer in future.result(0)}
    assert "left" in answers["h2"]
    assert "in time" in answers["h3"]


def test_call_of_the_only_head_has_no_answers() -> None:
    world = World()
    world.connect("h1")
    world.exchange("h1")
    future = world.heads["h1"].session.call("greet", None, deadline=world.now + 1)
    world.exchange("h1")
    assert future.result(0) == []


def test_call_that_the_coordinator_does_not_confirm_fails_in_time(world: World) -> None:
    caller = world.heads["h1"]
    future = caller.session.call("greet", None, deadline=world.now + 1)
    caller.session.frames.clear()
    caller.hear(caller.session.watch(world.now + 1.0, 10**6))
    assert isinstance(future.exception(0), NoSeatError)


def test_call_without_a_seat_fails_at_once(world: World) -> None:
    world.heads["h1"].session.disconnected()
    assert isinstance(world.heads["h1"].session.call("greet", None, world.now + 9).exception(0), NoSeatError)


def test_answer_that_cannot_be_sent_is_an_error_for_the_caller(world: World) -> None:
    future = world.heads["h1"].session.call("greet", None, deadline=world.now + 5)
    world.exchange("h1", "h2", "h3")
    world.heads["h2"].session.answer(world.heads["h2"].calls[0], object(), "")
    world.heads["h3"].session.answer(world.heads["h3"].calls[0], "x" * 300_000, "")
    world.exchange("h1", "h2", "h3")
    assert all(answer.error for answer in future.result(0))


def test_silence_of_the_coordinator_voids_what_others_said_but_not_the_list(world: World) -> None:
    world.announce(make_event("a"))
    world.report("h2", work())
    world.settle()
    head = world.heads["h1"]
    before = len(head.lists)
    head.hear(head.session.watch(world.now + 1.9, 10**6))
    assert head.others["h2"]
    head.hear(head.session.watch(world.now + 2.0, 10**6))
    assert head.others == {}
    assert len(head.lists) == before
    world.settle()
    assert head.others["h2"]


def test_head_that_left_while_another_was_cut_off_is_forgotten(world: World) -> None:
    world.report("h2", work())
    world.settle()
    world.heads["h2"].session.leave()
    world.heads["h1"].session.disconnected()
    world.exchange("h2")
    world.connect("h1")
    world.exchange("h1")
    assert "h2" not in world.heads["h1"].others
