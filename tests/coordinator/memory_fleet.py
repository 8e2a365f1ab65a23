"""A coordinator and heads without sockets. The test delivers frames, fills queues and cuts connections."""

from collections import deque

import zmq

from vllm_omni_plugin.coordinator import (
    FullList,
    HeadInfo,
    HeadLeft,
    HeadWork,
    ListDelta,
    ReplicaEvent,
    ReplicaInfo,
    ReplicaKey,
    ReplicaList,
    ReplicaWork,
    SessionEvent,
    SessionLost,
    Welcome,
)
from vllm_omni_plugin.coordinator.client.head_client import HeadSession, SessionOutput
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState
from vllm_omni_plugin.coordinator.protocol.head_messages import RelayedCall, SessionRefused
from vllm_omni_plugin.coordinator.server.head_frames import HeadFrames
from vllm_omni_plugin.coordinator.state.connected_heads import ConnectedHeads
from vllm_omni_plugin.coordinator.state.list_deltas import ListDeltas, replica_list
from vllm_omni_plugin.coordinator.state.membership_table import MembershipTable
from vllm_omni_plugin.coordinator.state.number_book import ReplicaIds
from vllm_omni_plugin.errors import WireError

QUEUE_FRAMES = 3
GENERATION = "of the coordinator's head"

Row = tuple[str, int, bool, str, int]
"""A listed replica without its id and times."""


def rows(replicas: ReplicaList) -> frozenset[Row]:
    listed = [(info, True) for info in replicas.replicas] + [(info, False) for info in replicas.no_new_work]
    return frozenset(
        (info.input_addr, info.stage_id, accepts, info.status.value, info.incarnation) for info, accepts in listed
    )


def numbers(replicas: ReplicaList) -> dict[str, int]:
    return {info.input_addr: info.replica_id for info in (*replicas.replicas, *replicas.no_new_work)}


class ReceivedState:
    """The state that a head builds from its events, as an orchestrator does."""

    def __init__(self) -> None:
        self.lists: list[ReplicaList] = []
        self.documents: list[FleetState] = []
        self.calls: list[RelayedCall] = []
        self._rows: dict[ReplicaKey, tuple[ReplicaInfo, bool]] = {}
        self.others: dict[str, dict[int, ReplicaWork]] = {}
        self.resyncs = self.losses = 0

    def apply(self, event: SessionEvent) -> None:
        match event:
            case Welcome():
                self.resyncs += 1
                self.others = {name: work for name, work in self.others.items() if name in event.heads}
            case FullList() | ListDelta():
                gone = self._rows.keys() if isinstance(event, FullList) else event.removed
                listed = [(info, True) for info in event.replicas] + [(info, False) for info in event.no_new_work]
                self._rows = {key: row for key, row in self._rows.items() if key not in gone}
                self._rows |= {ReplicaKey.of(info): (info, accepts) for info, accepts in listed}
                accepting = [info for info, accepts in self._rows.values() if accepts]
                others = [info for info, accepts in self._rows.values() if not accepts]
                self.lists.append(ReplicaList(accepting, event.timestamp, others))
            case HeadWork():
                known = {} if event.full else self.others.get(event.head_id, {})
                known |= {row.engine: row for row in event.work}
                self.others[event.head_id] = {engine: row for engine, row in known.items() if row.requests}
            case HeadLeft():
                self.others.pop(event.head_id, None)
            case FleetState():
                self.documents.append(event)
            case RelayedCall():
                self.calls.append(event)
            case SessionLost():
                self.losses += 1
                self.others.clear()


class Head(ReceivedState):
    """One head with its connection, and the frames in flight on it."""

    def __init__(self, name: str, generation: str) -> None:
        super().__init__()
        self.name, self.generation = name, generation
        self.session = HeadSession(name, generation)
        self.peer = b""
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.in_flight: dict[int, ReplicaWork] = {}
        self.dropped: list[WireError] = []
        self.refusals: list[str] = []

    def handle(self, outputs: list[SessionOutput]) -> None:
        """Handle the outputs of the session. After a welcome, report the work in flight."""
        for output in outputs:
            if isinstance(output, SessionRefused):
                self.refusals.append(output.reason)
            elif isinstance(output, WireError):
                self.dropped.append(output)
            else:
                self.apply(output)
                if isinstance(output, Welcome):
                    self.refusals.clear()
                    self.session.report(list(self.in_flight.values()), full=True)


class MemoryFleet:
    """Time passes and frames arrive only when the test says so. Also stands for the coordinator's ROUTER."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.queue_frames = QUEUE_FRAMES
        self.heads: dict[str, Head] = {}
        self.states: set[frozenset[Row]] = set()
        self._connections = 0
        self.restart()

    def send_multipart(self, message: tuple[bytes, bytes], flags: int) -> None:
        peer, frame = message
        head = next((head for head in self.heads.values() if head.peer == peer), None)
        if head is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if len(head.down) >= self.queue_frames:
            raise zmq.Again
        head.down.append(frame)

    def restart(self) -> None:
        """Replace the coordinator. All connections break."""
        self.table = MembershipTable(30.0)
        self.replica_ids = ReplicaIds()
        self.lists = ListDeltas(self.table, self.replica_ids)
        self.sessions = ConnectedHeads(self.lists, GENERATION)
        # There are no nodes.
        self.frames = HeadFrames(
            self.sessions,
            self,  # type: ignore[arg-type]
            lambda query: HeadInfo(0.0, [], {}),
        )
        self._note_state()
        for head in self.heads.values():
            self.connect(head.name, head.generation)

    def connect(self, name: str, generation: str = "") -> Head:
        """Give a head, perhaps a new one, a new connection. Frames in flight on the previous one are lost."""
        head = self.heads.setdefault(name, Head(name, generation))
        self._connections += 1
        head.peer = b"%d" % self._connections
        head.up.clear()
        head.down.clear()
        head.session.disconnected()
        head.session.open(self._connections)
        return head

    def announce(self, event: ReplicaEvent) -> None:
        change = self.table.apply(event, self.now)
        if change is not None:
            self.lists.record([change])
        self._note_state()

    def tick(self, seconds: float = 0.5) -> None:
        self.now += seconds
        self.lists.record(self.table.expire(self.now))
        self._note_state()
        self.frames.send(self.sessions.expire(self.now))
        delta = self.lists.next_delta(self.now, self.now)
        if delta is not None:
            self.frames.send(self.sessions.broadcast([delta]))
        self.resync()

    def resync(self) -> None:
        """Let the coordinator resync heads and relay work."""
        self.frames.send(self.sessions.tick(self.now))

    def listed(self) -> ReplicaList:
        return replica_list(self.table, self.replica_ids, self.now, self.now)

    def _note_state(self) -> None:
        events = [(m.event, m.takes_new_work) for m in self.table if m.takes_new_work or m.may_finish_work]
        self.states.add(
            frozenset((e.input_addr, e.stage_id, accepts, e.status.value, e.incarnation) for e, accepts in events)
        )

    def deliver_up(self, name: str) -> bool:
        """Deliver one frame from a head; return whether there was one."""
        head = self.heads[name]
        while head.session.frames and len(head.up) < self.queue_frames:
            head.up.append(head.session.frames.popleft())
        if head.up:
            self.frames.receive(head.peer, head.up.popleft(), self.now)
            return True
        return False

    def deliver_down(self, name: str) -> bool:
        """Deliver one frame to a head; return whether there was one."""
        head = self.heads[name]
        if head.down:
            head.handle(head.session.receive(head.down.popleft(), self.now))
            return True
        return False

    def exchange(self, *names: str) -> None:
        """Deliver all frames from and to these heads."""
        while any(self.deliver_up(name) or self.deliver_down(name) for name in names):
            pass

    def settle(self) -> None:
        """Deliver frames and beats until silent heads are removed and the others know everything."""
        self.queue_frames = 1000
        for _ in range(7):
            for head in self.heads.values():
                head.handle(head.session.check_silence(self.now, int(self.now * 1000)))
                head.session.beat()
            self.exchange(*self.heads)
            self.resync()
            self.exchange(*self.heads)
            self.tick(1.0)
            self.exchange(*self.heads)
        for head in self.heads.values():
            head.session.beat()
        self.exchange(*self.heads)
        self.queue_frames = QUEUE_FRAMES

    def report(self, name: str, work: ReplicaWork) -> None:
        head = self.heads[name]
        if work.requests:
            head.in_flight[work.engine] = work
        else:
            head.in_flight.pop(work.engine, None)
        head.session.report([work], full=False)
