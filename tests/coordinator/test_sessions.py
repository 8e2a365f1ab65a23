"""Sessions of heads, ids of replicas and lists, without sockets."""

import itertools
from collections.abc import Iterator

import pytest
from coordinator_support import make_event
from head_world import QUEUE_FRAMES, World, numbers, rows

from vllm_omni_plugin.coordinator import (
    PeerWork,
    ReplicaEvent,
    ReplicaKey,
    ReplicaStatus,
    ReplicaWork,
    SessionLost,
    Welcome,
    engine_key,
)
from vllm_omni_plugin.coordinator.client.head_session import SILENCE_TIMEOUT, HeadSession
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import HEAD_QUEUE_FRAMES
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    SESSION_PROTOCOL,
    Beat,
    CallRefused,
    Hello,
    OperatorCall,
    ReplicaIdRow,
    SessionRefused,
    WorkReport,
    encode_from_head,
    encode_to_head,
    frames_to_head,
)
from vllm_omni_plugin.coordinator.state.connected_heads import HEAD_TIMEOUT, MAX_HEADS, MAX_WORK_ROWS, ConnectedHead
from vllm_omni_plugin.coordinator.state.list_deltas import ListDeltas, ReplicaIds
from vllm_omni_plugin.coordinator.state.membership_table import MembershipTable, TableFullError
from vllm_omni_plugin.errors import WireError


def key(name: str, stage_id: int = 0) -> ReplicaKey:
    return ReplicaKey(stage_id, f"tcp://{name}:1", f"tcp://{name}:2")


def number(name: str, replica_id: int) -> ReplicaIdRow:
    return ReplicaIdRow(*key(name), replica_id)


def engine(name: str = "a") -> int:
    return engine_key(*key(name), 0)


def work(name: str = "a", requests: int = 1) -> ReplicaWork:
    return ReplicaWork(engine(name), requests, 10 * requests)


def hello(head_id: str, session: int = 10**9) -> Hello:
    return Hello(head_id, session, SESSION_PROTOCOL)


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
    replica_ids = ReplicaIds()
    assert [replica_ids.id_of(key(name)) for name in "abca"] == [0, 1, 2, 0]
    assert replica_ids.id_of(key("x", stage_id=1)) == 0
    replica_ids.release(key("b"))
    replica_ids.release(key("unknown"))
    assert [replica_ids.id_of(key(name)) for name in "de"] == [1, 3]


def test_reserved_numbers_wait_for_their_replicas_until_the_end_of_reservations() -> None:
    replica_ids = ReplicaIds()
    replica_ids.reserve([number("b", 0), number("a", 5), number("thief", 5), number("b", 9)])
    assert [replica_ids.id_of(key(name)) for name in "axb"] == [5, 1, 0]
    replica_ids.reserve([number("gone", 2), number("x", 7), number("late", 5)])
    replica_ids.end_reservations()
    assert [replica_ids.id_of(key(name)) for name in ("y", "late", "x")] == [2, 3, 1]


def test_numbers_of_the_heads_own_engines_are_given_to_nobody() -> None:
    replica_ids = ReplicaIds({0: 2})
    replica_ids.reserve([number("a", 1), number("b", 3)])
    assert [replica_ids.id_of(key(name)) for name in "abc"] == [2, 3, 4]
    assert replica_ids.id_of(key("x", stage_id=1)) == 0
    replica_ids.release(key("a"))
    replica_ids.reserve([number("d", 7)])
    replica_ids.end_reservations()
    assert replica_ids.id_of(key("e")) == 2


def test_number_of_a_row_that_was_displaced_is_free_again() -> None:
    table, replica_ids = MembershipTable(10.0, max_replicas=1), ReplicaIds()
    lists = ListDeltas(table, replica_ids)

    def announce(event: ReplicaEvent) -> None:
        change = table.apply(event, 0.0)
        assert change is not None
        lists.record([change])
        lists.next_delta(0.0, 0.0)

    announce(make_event("a"))
    announce(make_event("a", status=ReplicaStatus.DOWN))
    assert replica_ids.id_of(key("a", stage_id=make_event("a").stage_id)) == 0
    announce(make_event("b"))
    assert replica_ids.id_of(key("b", stage_id=make_event("b").stage_id)) == 0


def test_replica_keeps_its_number_when_it_comes_back_and_when_the_coordinator_does(world: World) -> None:
    for name in "abc":
        world.announce(make_event(name))
    world.settle()
    before = numbers(world.heads["h1"].lists[-1])
    world.announce(make_event("b", status=ReplicaStatus.DOWN))
    world.settle()
    world.announce(make_event("b", incarnation=5))
    world.settle()
    assert numbers(world.heads["h1"].lists[-1]) == before

    world.restart()
    world.exchange("h1", "h2", "h3")
    world.resync()
    world.exchange("h1", "h2", "h3")
    for name in "xcba":
        world.announce(make_event(name))
    world.settle()
    assert numbers(world.heads["h2"].lists[-1]) == {**before, "tcp://x:1": 3}


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


def test_a_whole_list_is_not_older_than_the_change_before_it(world: World) -> None:
    world.announce(make_event("a"))
    # This head is told of the change by a whole list, and the others by what changed.
    world.connect("h1")
    world.settle()
    world.connect("h1")
    world.settle()
    times = [replicas.timestamp for replicas in world.heads["h1"].lists]
    assert times == sorted(times)


def test_heartbeats_alone_make_no_list(world: World) -> None:
    world.announce(make_event("a"))
    world.tick()
    world.exchange("h1")
    for _ in range(5):
        world.announce(make_event("a"))
        world.tick()
    assert not world.heads["h1"].down


def test_a_queue_that_overflows_is_followed_by_a_full_resync(world: World) -> None:
    head = world.heads["h1"]
    resyncs = head.resyncs
    for name in "abcdefgh"[: QUEUE_FRAMES + 3]:
        world.announce(make_event(name))
        world.tick()
    world.report("h2", work())
    world.exchange("h1", "h2")
    assert len(head.lists[-1].replicas) == QUEUE_FRAMES, "no list came after the one that was lost"
    world.tick()
    world.exchange("h1")
    assert rows(head.lists[-1]) == rows(world.listed())
    assert head.others["h2"] == {engine(): work()}
    assert head.resyncs == resyncs + 1


def test_a_head_that_has_too_much_to_send_begins_anew(world: World) -> None:
    head = world.heads["h1"]
    for requests in range(HEAD_QUEUE_FRAMES + 5):
        world.report("h1", work(requests=requests % 5 + 1))
    world.settle()
    assert world.heads["h2"].others["h1"] == head.in_flight
    assert head.resyncs == 2


def test_a_frame_that_cannot_be_read_is_followed_by_a_full_resync(world: World) -> None:
    head = world.heads["h1"]
    (dropped,) = head.session.receive(b"[{}]", world.now)
    assert isinstance(dropped, WireError)
    world.announce(make_event("a"))
    world.tick()
    world.exchange("h1")
    assert head.lists[-1].replicas == []
    world.settle()
    assert (head.resyncs, len(head.lists[-1].replicas)) == (2, 1)


def test_reports_of_one_interval_share_a_frame_with_the_last_of_each_replica(world: World) -> None:
    for requests in (1, 2, 3):
        world.report("h1", work("a", requests))
        world.report("h3", work("b", requests))
    world.exchange("h1", "h3")
    world.tick()
    assert len(world.heads["h2"].down) == 1
    world.exchange("h2")
    assert world.heads["h2"].others["h1"] == {engine(): work("a", 3)}


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
    assert not world.sessions.expire(world.now, late_by=100.0)
    assert len(world.sessions) == 3


def test_older_connection_of_a_head_does_not_take_the_session_back(world: World) -> None:
    sessions = world.sessions
    assert sessions.handle(b"new", hello("h1"), world.now) is not None
    assert sessions.handle(b"old", hello("h1", 10**9 - 1), world.now) is None
    assert sessions.handle(b"other", hello("h1"), world.now) is None
    assert sessions.handle(b"old", WorkReport(True, [work()]), world.now) is None


def test_a_connection_is_of_one_head(world: World) -> None:
    peer = world.heads["h1"].peer
    assert world.sessions.handle(peer, hello("h2"), world.now) is None
    assert world.sessions.handle(peer, hello("h9"), world.now) is None


def test_a_head_without_a_session_is_told_why_until_there_is_one(world: World) -> None:
    for count in range(MAX_HEADS - len(world.sessions)):
        assert world.sessions.handle(b"p%d" % count, hello(f"x{count}"), world.now) is not None
    late = world.connect("late")
    with pytest.raises(TableFullError):
        world.exchange("late")
    world.exchange("late")
    assert late.refusals == ["there are 64 heads already"]
    world.sessions.connection_lost(b"p0")
    late.session.beat()
    world.exchange("late")
    world.tick()
    world.exchange("late")
    assert late.refusals == []
    assert late.lists


@pytest.mark.parametrize("protocol", [0, SESSION_PROTOCOL + 1])
def test_a_head_of_another_version_gets_no_session_and_is_told_what_to_do(world: World, protocol: int) -> None:
    stranger = world.connect("stranger")
    stranger.session.frames.clear()
    stranger.up.append(encode_from_head(Hello("stranger", 1, protocol)))
    with pytest.raises(WireError, match="same version of vllm-omni-plugin"):
        world.exchange("stranger")
    assert len(world.sessions) == 3
    world.exchange("stranger")
    (refusal,) = stranger.refusals
    assert f"head stranger speaks version {protocol} and the coordinator version {SESSION_PROTOCOL}" in refusal


@pytest.mark.parametrize(
    "call",
    [
        OperatorCall(7, "of_a_later_version", [], [0], []),
        OperatorCall(7, "pause_scheduler", ["x" * 9000, True], [0], []),
    ],
)
def test_a_caller_whose_call_the_coordinator_does_not_know_is_told_so(world: World, call: OperatorCall) -> None:
    head = world.heads["h1"]
    assert head.session.send(call)
    with pytest.raises(WireError, match=call.method):
        world.exchange("h1")
    (refused,) = head.session.receive(head.down.popleft(), world.now)
    assert isinstance(refused, CallRefused)
    assert refused.call_id == 7
    assert call.method in refused.reason


def test_full_resyncs_are_limited(world: World) -> None:
    head = world.heads["h1"]
    world.tick(1.0)
    head.down.clear()
    for _ in range(100):
        world.sessions.handle(head.peer, hello("h1"), world.now)
        world.tick(0.001)
    assert len(head.down) == 1


def test_work_of_one_head_is_bounded() -> None:
    session = ConnectedHead(hello("h"), b"p", 0.0)
    session.report(WorkReport(True, []))
    for frame in range(30):
        session.report(WorkReport(False, [work(f"r{frame}-{number}") for number in range(400)]))
    known = session.all_work()
    assert known is not None
    assert len(known.work) <= MAX_WORK_ROWS
    session.report(WorkReport(True, [work()]))
    assert session.take_changes().work == [work()]


def test_silence_of_the_coordinator_voids_what_others_said_but_not_the_list(world: World) -> None:
    world.announce(make_event("a"))
    world.report("h2", work())
    world.settle()
    head = world.heads["h1"]
    before = len(head.lists)
    head.hear(head.session.check_silence(world.now + 1.9, 10**6))
    assert head.others["h2"]
    head.hear(head.session.check_silence(world.now + 2.0, 10**6))
    assert head.others == {}
    assert len(head.lists) == before
    world.settle()
    assert head.others["h2"]


@pytest.mark.parametrize("answer", ["refused", "unreadable"])
def test_a_coordinator_that_gives_a_head_no_session_any_more_is_as_good_as_silent(answer: str) -> None:
    session = HeadSession("head")
    state = encode_to_head(PeerWork("other", True, [work()]))
    (welcome,) = frames_to_head([encode_to_head(Welcome(["other"], False)), state])
    assert session.receive(welcome, 0.0) == [Welcome(["other"], False), PeerWork("other", True, [work()])]
    session.disconnected()
    session.open(2)
    (refused,) = frames_to_head([encode_to_head(SessionRefused("there are 64 heads already"))])
    for now in (0.5, 1.0, 1.5):
        session.receive(refused if answer == "refused" else b"nonsense", now)
        session.beat()
        assert session.check_silence(now, 3) == []
    assert session.check_silence(SILENCE_TIMEOUT, 4) == [SessionLost()]
    assert session.check_silence(2 * SILENCE_TIMEOUT, 5) == []


def test_a_beat_is_answered(world: World) -> None:
    assert world.sessions.handle(world.heads["h1"].peer, Beat(), world.now) == [(world.heads["h1"].peer, b"[]")]
