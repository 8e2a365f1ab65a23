"""Sessions of heads, ids of replicas, and lists: what is in them, and when they go out. Without sockets."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from coordinator_support import make_event
from memory_fleet import GENERATION, MemoryFleet, rows

from vllm_omni_plugin.coordinator import (
    HeadWork,
    ReplicaKey,
    ReplicaStatus,
    ReplicaWork,
    SessionLost,
    Welcome,
    engine_key,
    generation_of,
)
from vllm_omni_plugin.coordinator.client.head_client import SILENCE_TIMEOUT, HeadSession
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import HEAD_QUEUE_FRAMES
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    OLDEST_SESSION_PROTOCOL,
    SESSION_PROTOCOL,
    CallRefused,
    FleetCall,
    Hello,
    SessionRefused,
    WorkReport,
    encode_from_head,
    encode_to_head,
    frames_to_head,
)
from vllm_omni_plugin.coordinator.state.connected_heads import HEAD_TIMEOUT, MAX_WORK_ROWS, ConnectedHead
from vllm_omni_plugin.coordinator.state.list_deltas import PublishSchedule, replica_list
from vllm_omni_plugin.coordinator.state.membership_table import Liveness, Member
from vllm_omni_plugin.coordinator.state.number_book import ReplicaIds
from vllm_omni_plugin.errors import WireError


def key(name: str, stage_id: int = 0) -> ReplicaKey:
    return ReplicaKey(stage_id, f"tcp://{name}:1", f"tcp://{name}:2")


def engine(name: str = "a") -> int:
    return engine_key(*key(name), 0)


def work(name: str = "a", requests: int = 1) -> ReplicaWork:
    return ReplicaWork(engine(name), requests, 10 * requests)


def hello(head_id: str, session: int = 10**9) -> Hello:
    return Hello(head_id, session, SESSION_PROTOCOL)


@pytest.fixture
def fleet() -> Iterator[MemoryFleet]:
    """Three heads that know each other."""
    fleet = MemoryFleet()
    for name in ("h1", "h2", "h3"):
        fleet.connect(name)
    fleet.settle()
    yield fleet
    assert not any(head.dropped for head in fleet.heads.values())


def test_engine_keys_are_unique_and_the_same_in_all_processes() -> None:
    engines = list(itertools.product(range(3), "ab", "ab", range(50)))
    assert len({engine_key(*engine) for engine in engines}) == len(engines)
    # Computed by each head for itself: it may not depend on the process.
    assert engine_key(0, "tcp://10.0.0.1:40001", "tcp://10.0.0.1:40002", 7) == 5802032172893674


def test_a_full_list_is_followed_by_deltas(fleet: MemoryFleet) -> None:
    for name in "abcdefgh":
        fleet.announce(make_event(name))
    fleet.tick()
    (whole,) = fleet.heads["h1"].down
    fleet.exchange("h1")
    fleet.announce(make_event("a", status=ReplicaStatus.DRAINING))
    fleet.tick()
    (delta,) = fleet.heads["h1"].down
    assert len(delta) < len(whole) / 4
    fleet.exchange("h1")
    assert [len(replicas.replicas) for replicas in fleet.heads["h1"].lists] == [0, 8, 7]
    assert [row.input_addr for row in fleet.heads["h1"].lists[-1].no_new_work] == ["tcp://a:1"]


def test_heartbeats_alone_cause_no_delta(fleet: MemoryFleet) -> None:
    fleet.announce(make_event("a"))
    fleet.tick()
    fleet.exchange("h1")
    for _ in range(5):
        fleet.announce(make_event("a"))
        fleet.tick()
    assert not fleet.heads["h1"].down


def test_a_head_with_a_full_queue_opens_a_new_session(fleet: MemoryFleet) -> None:
    head = fleet.heads["h1"]
    for requests in range(HEAD_QUEUE_FRAMES + 5):
        fleet.report("h1", work(requests=requests % 5 + 1))
    fleet.settle()
    assert fleet.heads["h2"].others["h1"] == head.in_flight
    assert head.resyncs == 2


def test_reports_of_one_interval_share_a_frame_with_the_last_of_each_replica(fleet: MemoryFleet) -> None:
    for requests in (1, 2, 3):
        fleet.report("h1", work("a", requests))
        fleet.report("h3", work("b", requests))
    fleet.exchange("h1", "h3")
    fleet.tick()
    assert len(fleet.heads["h2"].down) == 1
    fleet.exchange("h2")
    assert fleet.heads["h2"].others["h1"] == {engine(): work("a", 3)}


def test_a_silent_head_is_removed(fleet: MemoryFleet) -> None:
    fleet.report("h1", work())
    fleet.settle()
    for _ in range(6):
        fleet.tick(HEAD_TIMEOUT / 5)
        for name in ("h2", "h3"):
            fleet.heads[name].session.beat()
            fleet.exchange(name)
    assert "h1" not in fleet.heads["h2"].others
    assert "h1" not in fleet.heads["h3"].others


def test_a_late_coordinator_removes_no_head(fleet: MemoryFleet) -> None:
    fleet.now += 100.0
    assert not fleet.sessions.expire(fleet.now, late_by=100.0)
    assert len(fleet.sessions) == 3


def test_an_older_connection_of_a_head_is_ignored(fleet: MemoryFleet) -> None:
    sessions = fleet.sessions
    assert sessions.handle(b"new", hello("h1"), fleet.now) is not None
    assert sessions.handle(b"old", hello("h1", 10**9 - 1), fleet.now) is None
    assert sessions.handle(b"other", hello("h1"), fleet.now) is None
    assert sessions.handle(b"old", WorkReport(True, [work()]), fleet.now) is None
    # A connection belongs to one head.
    for other in ("h2", "h9"):
        assert sessions.handle(b"new", hello(other), fleet.now) is None


@pytest.mark.parametrize("protocol", [SESSION_PROTOCOL, SESSION_PROTOCOL + 1, SESSION_PROTOCOL + 2])
def test_a_head_of_the_next_two_versions_gets_a_session_since_they_read_this_one(protocol: int) -> None:
    fleet = MemoryFleet()
    sessions = fleet.sessions
    assert sessions.handle(b"new", Hello("newer", 1, protocol), fleet.now) == []
    assert len(sessions) == 1


@pytest.mark.parametrize("protocol", [0, OLDEST_SESSION_PROTOCOL - 1, SESSION_PROTOCOL + 3])
def test_a_head_of_another_version_is_refused_with_the_reason(fleet: MemoryFleet, protocol: int) -> None:
    stranger = fleet.connect("stranger")
    stranger.session.frames.clear()
    stranger.up.append(encode_from_head(Hello("stranger", 1, protocol)))
    with pytest.raises(WireError, match="vllm-omni-plugin are more than two apart"):
        fleet.exchange("stranger")
    assert len(fleet.sessions) == 3
    fleet.exchange("stranger")
    (refusal,) = stranger.refusals
    assert f"head stranger speaks version {protocol} and the coordinator version {SESSION_PROTOCOL}" in refusal


def is_readable(message: FleetCall) -> bool:
    try:
        encode_from_head(message)
    except WireError:
        return False
    return True


def test_a_call_that_a_head_could_not_read_is_refused_with_the_reason(fleet: MemoryFleet) -> None:
    def nested(depth: int) -> list[Any]:
        value: list[Any] = []
        for _ in range(depth):
            value = [value]
        return value

    head = fleet.heads["h1"]
    # The deepest that this stack can read is too deep for a reader of another one.
    deepest = max(depth for depth in range(700, 1000, 10) if is_readable(FleetCall(7, arguments=nested(depth))))
    assert head.session.send(FleetCall(7, "collective_rpc", nested(deepest - 20)))
    with pytest.raises(WireError, match="recursion"):
        fleet.exchange("h1")
    (refused,) = head.session.receive(head.down.popleft(), fleet.now)
    assert isinstance(refused, CallRefused)
    assert refused.call_id == 7
    assert "recursion" in refused.reason


def test_a_head_gets_the_document_with_its_resync_and_the_last_head_takes_it_along(fleet: MemoryFleet) -> None:
    fleet.heads["h1"].session.send(FleetState(5, "h1"))
    fleet.exchange("h1")
    assert fleet.connect("late") is fleet.heads["late"]
    fleet.settle()
    assert [fleet.heads[name].documents[-1] for name in ("h2", "late")] == [FleetState(5, "h1")] * 2
    for name in list(fleet.heads):
        fleet.sessions.connection_lost(fleet.heads.pop(name).peer)
    fleet.connect("next")
    fleet.settle()
    assert fleet.heads["next"].documents == [FleetState()]


def test_what_heads_and_operators_tell_each_other_stays_within_a_generation(fleet: MemoryFleet) -> None:
    for name in ("new1", "new2"):
        fleet.connect(name, "new")
    fleet.announce(make_event("a"))
    fleet.settle()
    old, new = fleet.heads["h1"], fleet.heads["new1"]
    # All see all replicas: what is not theirs is shown.
    assert rows(old.lists[-1]) == rows(new.lists[-1]) != frozenset()
    fleet.report("h2", work())
    fleet.report("new2", work("b"))
    fleet.settle()
    assert {name for name, known in old.others.items() if known} == {"h2"}
    assert {name for name, known in new.others.items() if known} == {"new2"}
    new.session.send(FleetCall(1, "reset_prefix_cache", [], [0], FleetState(1, "new1")))
    fleet.settle()
    assert [call.method for call in fleet.heads["new2"].calls] == ["reset_prefix_cache"]
    assert [fleet.heads[name].calls for name in ("h1", "h2", "h3")] == [[], [], []]
    assert fleet.connect("new3", "new").documents == fleet.connect("h4").documents == []
    fleet.settle()
    assert fleet.heads["new3"].documents == [FleetState(1, "new1")]
    assert fleet.heads["h4"].documents == [FleetState()]


def test_the_document_of_a_generation_goes_with_its_last_head(fleet: MemoryFleet) -> None:
    fleet.connect("new1", "new")
    fleet.settle()
    fleet.heads["new1"].session.send(FleetState(5, "new1"))
    fleet.heads["h1"].session.send(FleetState(7, "h1"))
    fleet.settle()
    fleet.sessions.connection_lost(fleet.heads.pop("new1").peer)
    fleet.connect("new2", "new")
    fleet.connect("h4")
    fleet.settle()
    assert fleet.heads["new2"].documents == [FleetState()]
    assert fleet.heads["h4"].documents == [FleetState(7, "h1")]


def test_a_head_that_names_no_generation_is_of_the_one_of_the_coordinators_head(fleet: MemoryFleet) -> None:
    named = fleet.connect("named", GENERATION)
    fleet.report("h2", work())
    fleet.settle()
    assert named.others["h2"]


def test_a_generation_is_what_is_compared_of_all_stages() -> None:
    plain = {0: {"model": "a", "vLLM version": "0.32.0"}, 1: {"model": "b"}}
    assert generation_of(plain) == generation_of({1: {"model": "b"}, 0: dict(reversed(plain[0].items()))})
    others = [{0: plain[0]}, plain | {1: {"model": "c"}}, plain | {0: plain[0] | {"vLLM version": "0.33.0"}}]
    assert len({generation_of(each) for each in [plain, *others]}) == 4


def test_a_new_coordinator_says_nothing_of_the_document_before_its_first_list() -> None:
    fleet = MemoryFleet()
    fresh, former = fleet.connect("fresh"), fleet.connect("former")
    fleet.exchange("fresh", "former")
    fleet.resync()
    fleet.exchange("fresh", "former")
    former.session.send(FleetState(5, "former"))
    fleet.exchange("former")
    assert (fresh.resyncs, fresh.documents, former.documents) == (1, [], [])
    fleet.tick()
    fleet.exchange("fresh", "former")
    assert fresh.documents[-1] == former.documents[-1] == FleetState(5, "former")


def test_full_resyncs_are_limited(fleet: MemoryFleet) -> None:
    head = fleet.heads["h1"]
    fleet.tick(1.0)
    head.down.clear()
    for _ in range(100):
        fleet.sessions.handle(head.peer, hello("h1"), fleet.now)
        fleet.tick(0.001)
    assert len(head.down) == 1


def test_work_of_one_head_is_bounded() -> None:
    session = ConnectedHead(hello("h"), "", b"p", 0.0)
    session.report(WorkReport(True, []))
    for frame in range(30):
        session.report(WorkReport(False, [work(f"r{frame}-{number}") for number in range(400)]))
    known = session.all_work()
    assert known is not None
    assert len(known.work) <= MAX_WORK_ROWS
    session.report(WorkReport(True, [work()]))
    assert session.take_changes().work == [work()]


def test_silence_of_the_coordinator_drops_the_work_of_others_but_not_the_list(fleet: MemoryFleet) -> None:
    fleet.announce(make_event("a"))
    fleet.report("h2", work())
    fleet.settle()
    head = fleet.heads["h1"]
    before = len(head.lists)
    head.handle(head.session.check_silence(fleet.now + 1.9, 10**6))
    assert head.others["h2"]
    head.handle(head.session.check_silence(fleet.now + 2.0, 10**6))
    assert head.others == {}
    assert len(head.lists) == before
    fleet.settle()
    assert head.others["h2"]


@pytest.mark.parametrize("answer", ["refused", "unreadable"])
def test_a_coordinator_that_refuses_a_session_counts_as_silent(answer: str) -> None:
    session = HeadSession("head")
    state = encode_to_head(HeadWork("other", True, [work()]))
    (welcome,) = frames_to_head([encode_to_head(Welcome(["other"])), state])
    assert session.receive(welcome, 0.0) == [Welcome(["other"]), HeadWork("other", True, [work()])]
    session.disconnected()
    session.open(2)
    (refused,) = frames_to_head([encode_to_head(SessionRefused("there are 64 heads already"))])
    for now in (0.5, 1.0, 1.5):
        session.receive(refused if answer == "refused" else b"nonsense", now)
        session.beat()
        assert session.check_silence(now, 3) == []
    assert session.check_silence(SILENCE_TIMEOUT, 4) == [SessionLost()]
    assert session.check_silence(2 * SILENCE_TIMEOUT, 5) == []


def test_under_any_load_at_most_ten_lists_go_out_per_second() -> None:
    schedule = PublishSchedule(0.0, quiet_until=0.0)
    published = 0
    for step in range(100_000):
        now = step / 10_000
        schedule.request(now)
        if now >= schedule.due_at:
            schedule.published(now)
            published += 1
    assert 90 <= published <= 100


def test_without_changes_the_keep_alive_is_due_every_five_seconds() -> None:
    schedule = PublishSchedule(0.0, quiet_until=0.0)
    schedule.published(3.0)
    assert schedule.due_at == 8.0


def test_list_shows_times_by_the_wall_clock() -> None:
    member = Member(make_event(queue_length=4), Liveness.ALIVE, registered_at=10.0, last_event_at=40.0, changed_at=10.0)
    shown = replica_list([member], ReplicaIds(), now=50.0, wall_now=1_000_050.0)
    assert shown.timestamp == 1_000_050.0
    (info,) = shown.replicas
    assert (info.registered_at, info.last_heartbeat, info.queue_length) == (1_000_010.0, 1_000_040.0, 4)


def test_list_has_a_stable_order() -> None:
    def shown(*order: str) -> list[str]:
        members = [Member(make_event(name), Liveness.ALIVE, 0.0, 0.0, 0.0) for name in order]
        return [info.input_addr for info in replica_list(members, ReplicaIds(), 0.0, 0.0).replicas]

    assert shown("c", "a", "b") == shown("b", "c", "a") == ["tcp://a:1", "tcp://b:1", "tcp://c:1"]
