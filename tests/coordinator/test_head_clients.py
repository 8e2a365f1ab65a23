"""Heads at a live coordinator over real sockets."""

import random
from collections.abc import Callable

import msgspec
import pytest
import zmq
from coordinator_support import ANY, OpenDealer, OpenSocket, eventually, free_address, make_event, names
from memory_fleet import ReceivedState, numbers

from tests.fakes.hostile_frames import hostile_message
from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator import (
    FullList,
    ListDelta,
    OmniCoordClientForHead,
    OmniCoordClientForStage,
    OmniCoordinator,
    OmniCoordinatorRuntime,
    ReplicaKey,
    ReplicaList,
    ReplicaWork,
    SessionEvent,
    Welcome,
    engine_key,
)
from vllm_omni_plugin.coordinator.client import head_client
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import ROLE
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState, StageState, next_version
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    SESSION_PROTOCOL,
    Beat,
    Bye,
    CallDone,
    FleetCall,
    Hello,
    RelayedCall,
    WorkReport,
    encode_from_head,
    encode_to_head,
    frames_to_head,
)
from vllm_omni_plugin.coordinator.state import connected_heads
from vllm_omni_plugin.curve import Secrets, secure_client
from vllm_omni_plugin.errors import ConfigError, WireError

ROW = ReplicaWork(engine_key(0, "tcp://a:1", "tcp://a:2", 7), 3, 500)
SECRETS = Secrets(["a secret that heads share"])
CALL = FleetCall(7, "reset_prefix_cache", [False, True], [0])


class RecordingHead(ReceivedState):
    """A head that records its events and, after a welcome, reports its work in flight."""

    def __init__(self, address: str, head_id: str, secrets: Secrets | None = None, interval: float = 0.2) -> None:
        super().__init__()
        self.head_id = head_id
        self.in_flight: list[ReplicaWork] = []
        self.problems: list[str] = []
        self.client = OmniCoordClientForHead(
            address,
            head_id,
            self.handle,
            secrets=secrets,
            heartbeat_interval=interval,
            on_unreachable=self.problems.append,
        )

    def handle(self, event: SessionEvent) -> None:
        self.apply(event)
        if isinstance(event, Welcome):
            self.client.report_work(self.in_flight, full=True)
        elif isinstance(event, RelayedCall) and event.method == "profile":
            raise RuntimeError("a callback may fail")

    @property
    def replicas(self) -> ReplicaList:
        return self.lists[-1] if self.lists else ReplicaList([], 0.0)

    def report(self, *in_flight: ReplicaWork) -> None:
        """Report work in flight, now and after each welcome."""
        self.in_flight = list(in_flight)
        self.client.report_work(self.in_flight, full=True)


Connect = Callable[..., RecordingHead]


@pytest.fixture
def connect(keep: Keep) -> Connect:
    def connect(address: str, *head_ids: str, secrets: Secrets | None = None) -> list[RecordingHead]:
        heads = [RecordingHead(address, head_id, secrets) for head_id in head_ids]
        for head in heads:
            keep(head.client)
        eventually(lambda: all(head.resyncs for head in heads))
        return heads

    return connect


@pytest.fixture(params=[None, SECRETS], ids=["open", "secret"])
def secrets(request: pytest.FixtureRequest) -> Secrets | None:
    given: Secrets | None = request.param
    return given


@pytest.fixture
def fleet(keep: Keep, secrets: Secrets | None) -> OmniCoordinator:
    """A coordinator with and without a secret."""
    return keep(OmniCoordinator(ANY, ANY, heartbeat_timeout=1000.0, secrets=secrets))


def test_heads_get_replicas_work_and_calls(fleet: OmniCoordinator, secrets: Secrets | None, connect: Connect) -> None:
    first, second = connect(fleet.router_zmq_addr, "first", "second", secrets=secrets)
    fleet.add_new_replica(make_event("b"))
    fleet.add_new_replica(make_event("a"))
    eventually(lambda: names(first.replicas) == names(second.replicas) == ["a", "b"])
    assert sorted(row.replica_id for row in first.replicas.replicas) == [0, 1]
    fleet.remove_replica(make_event("a"))
    eventually(lambda: names(first.replicas) == names(second.replicas) == ["b"])

    first.report(ROW)
    eventually(lambda: second.others.get("first") == {ROW.engine: ROW})
    assert first.client.send(CALL)
    eventually(lambda: [call.head_id for call in first.calls + second.calls] == ["first", "first"])
    assert first.calls[0].arguments == second.calls[0].arguments == [False, True]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the coordinator may answer late."""
    monkeypatch.setattr(head_client, "SILENCE_TIMEOUT", 20.0)


@pytest.mark.usefixtures("patient")
def test_report_of_thousands_of_replicas_arrives_whole(coordinator: OmniCoordinator, connect: Connect) -> None:
    first, second = connect(coordinator.router_zmq_addr, "first", "second")
    work = [ReplicaWork(number, 1, 1) for number in range(2000)]
    first.report(*work)
    late = connect(coordinator.router_zmq_addr, "late")[0]
    eventually(lambda: list(late.others.get("first", {}).values()) == work)
    assert second.losses == 0


def test_head_that_closes_leaves_at_once(
    coordinator: OmniCoordinator, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its silence would end its session as well.
    monkeypatch.setattr(connected_heads, "HEAD_TIMEOUT", 1000.0)
    (first,) = connect(coordinator.router_zmq_addr, "first")
    leaver = RecordingHead(coordinator.router_zmq_addr, "leaver")
    eventually(lambda: leaver.resyncs)
    leaver.report(ROW)
    eventually(lambda: first.others.get("leaver") == {ROW.engine: ROW})
    leaver.client.close()
    eventually(lambda: "leaver" not in first.others)
    leaver.report(ROW)
    assert not leaver.client.send(CALL)
    with pytest.raises(RuntimeError, match="closed"):
        leaver.client.close()


def test_failing_callback_still_gets_later_events(coordinator: OmniCoordinator, connect: Connect) -> None:
    first, second = connect(coordinator.router_zmq_addr, "first", "second")
    first.client.send(FleetCall(1, "profile", [True, None, None, None]))
    eventually(lambda: first.client.send(CALL) and first.calls and second.calls)


def test_the_first_list_of_a_new_coordinator_has_replicas_that_register_after_a_head(
    keep: Keep, connect: Connect
) -> None:
    runtime = keep(OmniCoordinatorRuntime(heartbeat_timeout=3.0))
    # It may have had a session with the coordinator of a head that this one replaces.
    (head,) = connect(runtime.router_address, "head")
    eventually(lambda: head.resyncs)
    keep(OmniCoordClientForStage(runtime.router_address, "tcp://a:1", "tcp://a:2", 0))
    eventually(lambda: head.lists)
    assert numbers(head.lists[0]) == {"tcp://a:1": 0}


def test_impossible_address_interval_and_id_are_refused() -> None:
    with pytest.raises(ConfigError, match="no-address"):
        RecordingHead("no-address", "head")
    with pytest.raises(WireError, match="head_id"):
        RecordingHead(free_address(), "x" * 129)
    with pytest.raises(ConfigError, match="heartbeat_interval"):
        RecordingHead(free_address(), "head", interval=0.0)


def test_call_that_is_too_large_or_no_json_is_the_callers_error(coordinator: OmniCoordinator, connect: Connect) -> None:
    (head,) = connect(coordinator.router_zmq_addr, "head")
    for argument in ("x" * 300_000, object(), {"a": {1, 2}, "b": "\ud800"}):
        with pytest.raises(WireError):
            head.client.send(FleetCall(1, "collective_rpc", [argument], [0]))


FROM_HEADS = [
    Hello("stranger", 5, SESSION_PROTOCOL),
    WorkReport(True, [ROW]),
    FleetCall(1, "collective_rpc", ["greet", None, [[1]], {}], [0], FleetState(1, "x", (StageState(),)), 0, "", [5]),
    CallDone(1, "stranger"),
    FleetState(1, "stranger", (StageState(weight_version="v"),), (ReplicaKey(0, "tcp://a:1", "tcp://a:2"),)),
    Bye(),
    Beat(),
]
HELLO, WORK, RPC = (encode_from_head(FROM_HEADS[index]) for index in (0, 1, 2))
BAD_FRAMES = {
    "unknown-type": HELLO.replace(b"hello", b"hallo"),
    "no-id": HELLO.replace(b"stranger", b""),
    "truncated": HELLO[:-3],
    "negative-session": HELLO.replace(b'"session":5', b'"session":-5'),
    "short-row": WORK.replace(b",500,[]]", b"]"),
    "too-many-rows": b'{"type":"work_report","full":true,"work":[%s]}' % b",".join([msgspec.json.encode(ROW)] * 401),
    "no-utf8": RPC.replace(b"greet", b"\xff\xfe"),
    "deep": RPC.replace(b"[1]", b"[" * 5000 + b"]" * 5000),
    "deep-enough-to-be-read-here-only": RPC.replace(b"[1]", b"[" * 960 + b"]" * 960),
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_malformed_frame_of_a_head_is_counted_and_dropped(
    coordinator: OmniCoordinator, connect: Connect, dealer: OpenDealer, frame: bytes
) -> None:
    (neighbour,) = connect(coordinator.router_zmq_addr, "neighbour")
    peer = dealer(coordinator.router_zmq_addr)
    peer.send(HELLO)
    peer.send(frame)
    eventually(lambda: coordinator.invalid_frames["malformed"] == 1)
    neighbour.report(ROW)
    eventually(lambda: neighbour.client.send(CALL) and neighbour.calls)
    assert neighbour.client.invalid_frames == 0


@pytest.mark.parametrize(("version", "valid"), [(2**63 - 1, False), (2**32 - 1, True)], ids=["impossible", "largest"])
def test_a_document_of_any_version_leaves_versions_for_later_calls(
    coordinator: OmniCoordinator, connect: Connect, dealer: OpenDealer, version: int, valid: bool
) -> None:
    peer = dealer(coordinator.router_zmq_addr)
    peer.send(HELLO)
    peer.send(encode_from_head(FleetState(9, "liar")).replace(b"9", b"%d" % version))
    (head,) = connect(coordinator.router_zmq_addr, "head")
    eventually(lambda: coordinator.invalid_frames["malformed"] or head.documents[-1:] == [FleetState(version, "liar")])
    assert coordinator.invalid_frames["malformed"] == (not valid)
    base = head.documents[-1]
    for call_id in range(3):
        state = FleetState(next_version(base.version), "head")
        head.client.send(FleetCall(call_id, state=state, base_version=base.version, base_head=base.head_id))
        base = state
    eventually(lambda: [call.state for call in head.calls[-1:]] == [base])
    assert len(head.calls) == 3


def test_frames_without_a_session_are_stale(coordinator: OmniCoordinator, dealer: OpenDealer) -> None:
    peer = dealer(coordinator.router_zmq_addr)
    for message in FROM_HEADS:
        if not isinstance(message, Hello):
            peer.send(encode_from_head(message))
    eventually(lambda: coordinator.invalid_frames["stale"] == 6)


def test_a_head_reports_the_reason_of_a_missing_session(
    coordinator: OmniCoordinator, keep: Keep, dealer: OpenDealer
) -> None:
    peers = [dealer(coordinator.router_zmq_addr) for _ in range(64)]
    for number, peer in enumerate(peers):
        peer.send(encode_from_head(Hello(f"head-{number}", 1, SESSION_PROTOCOL)))
    for peer in peers:
        peer.recv()
    head = RecordingHead(coordinator.router_zmq_addr, "late", interval=0.05)
    keep(head.client)
    eventually(lambda: head.problems != [])
    assert not head.client.send(CALL)
    peers[0].send(encode_from_head(Bye()))
    eventually(lambda: len(head.problems) == 2)
    full = f"the coordinator at {coordinator.router_zmq_addr} gives this head no session: there are 64 heads already"
    assert head.problems == [full, ""]
    assert coordinator.invalid_frames["table-full"] > 0


@pytest.mark.usefixtures("patient")
def test_hostile_frames_of_heads_harm_neither_service_nor_neighbours(
    fleet: OmniCoordinator, secrets: Secrets | None, connect: Connect, open_socket: OpenSocket
) -> None:
    first, second = connect(fleet.router_zmq_addr, "neighbour", "second", secrets=secrets)
    fleet.add_new_replica(make_event("a"))
    rng = random.Random(6)
    peers = []
    for _ in range(3):
        peer = open_socket(zmq.DEALER)
        secure_client(peer, secrets, ROLE)
        peer.connect(fleet.router_zmq_addr)
        peers.append(peer)
    samples = [encode_from_head(message) for message in FROM_HEADS]
    for _ in range(5000):
        rng.choice(peers).send_multipart(hostile_message(rng, samples))
        if rng.random() < 0.3:
            rng.choice(peers).send(rng.choice(samples))
    first.report(ROW)
    eventually(lambda: second.others.get("neighbour") == {ROW.engine: ROW})
    eventually(lambda: names(first.replicas) == names(second.replicas) == ["a"])

    first.client.send(CALL)
    eventually(lambda: any(call.head_id == "neighbour" for call in second.calls))
    assert (first.losses, second.losses) == (0, 0)


def test_hostile_coordinator_harms_no_head(keep: Keep, open_socket: OpenSocket) -> None:
    router = open_socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    head = RecordingHead(f"tcp://127.0.0.1:{port}", "head")
    keep(head.client)
    peer = router.recv_multipart()[0]
    rng = random.Random(7)
    messages = [Welcome(["x"]), FullList([], 1.0), ListDelta([], 2.0, removed=[(0, "a", "b")])]
    samples = [frame for message in messages for frame in frames_to_head([encode_to_head(message)])]
    for _ in range(2000):
        router.send_multipart([peer, *hostile_message(rng, samples)])
    eventually(lambda: head.client.invalid_frames > 1000)
