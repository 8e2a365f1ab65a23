"""A coordinator and heads without sockets: queues that the test empties, fills up and cuts."""

from collections import deque

import zmq

from vllm_omni_plugin.coordinator import HeadListener, PeerCall, ReplicaEvent, ReplicaList, ReplicaWork
from vllm_omni_plugin.coordinator.deliveries import Refused
from vllm_omni_plugin.coordinator.editions import ListEditions
from vllm_omni_plugin.coordinator.head_desk import HeadDesk
from vllm_omni_plugin.coordinator.head_listener import tell
from vllm_omni_plugin.coordinator.head_session import HeadSession, News
from vllm_omni_plugin.coordinator.head_table import HeadTable
from vllm_omni_plugin.coordinator.membership import MembershipTable
from vllm_omni_plugin.coordinator.numbering import Numbering
from vllm_omni_plugin.coordinator.pending_calls import Settled
from vllm_omni_plugin.coordinator.snapshot import replica_list
from vllm_omni_plugin.errors import WireError

QUEUE_FRAMES = 3

Row = tuple[str, int, bool, str, int, int]


def rows(replicas: ReplicaList) -> frozenset[Row]:
    """Return what a list says, but for its times."""
    told = [(info, True) for info in replicas.replicas] + [(info, False) for info in replicas.no_new_work]
    return frozenset(
        (info.input_addr, info.stage_id, accepts, info.status.value, info.incarnation, info.replica_id)
        for info, accepts in told
    )


class Head(HeadListener):
    """One head with its connection: what it was told, and what is on its way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.session = HeadSession(name)
        self.peer = b""
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.in_flight: dict[int, ReplicaWork] = {}
        self.lists: list[ReplicaList] = []
        self.others: dict[str, dict[int, ReplicaWork]] = {}
        self.calls: list[PeerCall] = []
        self.dropped: list[WireError] = []
        self.refusals: list[str] = []
        self.seats = 0

    def seat_taken(self) -> None:
        self.seats += 1
        self.refusals.clear()

    def replicas_listed(self, replicas: ReplicaList) -> None:
        self.lists.append(replicas)

    def work_reported(self, head_id: str, work: object, full: bool) -> None:
        assert isinstance(work, list)
        known = self.others.setdefault(head_id, {})
        if full:
            known.clear()
        for row in work:
            known[row.engine] = row
            if not row.requests:
                del known[row.engine]

    def head_left(self, head_id: str) -> None:
        self.others.pop(head_id, None)

    def called(self, call: PeerCall) -> None:
        self.calls.append(call)

    def work_wanted(self) -> None:
        self.session.report(list(self.in_flight.values()), full=True)

    def seat_lost(self) -> None:
        self.others.clear()

    def hear(self, news: list[News]) -> None:
        """Take in what the session says."""
        for one in news:
            if isinstance(one, Settled):
                one.tell()
            elif isinstance(one, WireError):
                self.dropped.append(one)
            elif isinstance(one, Refused):
                self.refusals.append(one.reason)
            else:
                tell(self, one)


class Coordinator:
    """What `OmniCoordinator` is made of."""

    def __init__(self, world: "World", epoch: int) -> None:
        self.table = MembershipTable(30.0)
        self.numbering = Numbering()
        self.editions = ListEditions(self.table, self.numbering)
        self.heads = HeadTable(epoch, self.editions)
        self.desk = HeadDesk(self.heads, self.editions, world)  # type: ignore[arg-type]


class World:
    """Time passes, and frames arrive, only when told to. It is the coordinator's ROUTER as well."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.queue_frames = QUEUE_FRAMES
        self.heads: dict[str, Head] = {}
        self.published: dict[float, frozenset[Row]] = {}
        self._connections = 0
        self._epochs = 0
        self.restart()

    def send_multipart(self, letter: tuple[bytes, bytes], flags: int) -> None:
        peer, frame = letter
        head = next((head for head in self.heads.values() if head.peer == peer), None)
        if head is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if len(head.down) >= self.queue_frames:
            raise zmq.Again
        head.down.append(frame)

    def restart(self) -> None:
        """Begin with another coordinator; all connections break."""
        self._epochs += 1
        self.coordinator = Coordinator(self, self._epochs)
        for name in self.heads:
            self.connect(name)

    def connect(self, name: str) -> Head:
        """Give a head, maybe a new one, a new connection; what was on its way on the one before is lost."""
        head = self.heads.setdefault(name, Head(name))
        self._connections += 1
        head.peer = b"%d" % self._connections
        head.up.clear()
        head.down.clear()
        head.session.disconnected()
        head.session.connected(self._connections)
        return head

    def announce(self, event: ReplicaEvent) -> None:
        """Let a replica say something."""
        change = self.coordinator.table.apply(event, self.now)
        if change is not None:
            self.coordinator.editions.note([change])

    def tick(self, seconds: float = 0.5) -> None:
        """Let time pass at the coordinator."""
        self.now += seconds
        self.coordinator.editions.note(self.coordinator.table.expire(self.now))
        self.coordinator.desk.send(self.coordinator.heads.expire(self.now))
        self.coordinator.desk.send(self.coordinator.heads.relay(self.now))
        edition = self.coordinator.editions.revise(self.now, self.now)
        if edition is not None:
            self.published[self.now] = rows(self.listed())
            self.coordinator.desk.send(self.coordinator.heads.announce(edition))

    def listed(self) -> ReplicaList:
        """Return what the table says now."""
        return replica_list(self.coordinator.table, self.coordinator.numbering, self.now, self.now)

    def flush(self, name: str) -> None:
        """Move what a head has to send into its connection."""
        head = self.heads[name]
        while head.session.frames and len(head.up) < self.queue_frames:
            head.up.append(head.session.frames.popleft())

    def deliver_up(self, name: str) -> bool:
        """Let one frame of a head arrive; return whether there was one."""
        self.flush(name)
        head = self.heads[name]
        if head.up:
            self.coordinator.desk.take(head.peer, head.up.popleft(), self.now)
            return True
        return False

    def deliver_down(self, name: str) -> bool:
        """Let one frame for a head arrive; return whether there was one."""
        head = self.heads[name]
        if head.down:
            head.hear(head.session.take(head.down.popleft(), self.now))
            return True
        return False

    def exchange(self, *names: str) -> None:
        """Let all that is on its way from and to these heads arrive."""
        while any(self.deliver_up(name) or self.deliver_down(name) for name in names):
            pass

    def settle(self) -> None:
        """Let beats and all else arrive until whoever is silent has left and the others know everything."""
        self.queue_frames = 1000
        for _ in range(7):
            for head in self.heads.values():
                head.session.beat()
            self.tick(1.0)
            self.exchange(*self.heads)
        self.queue_frames = QUEUE_FRAMES

    def report(self, name: str, work: ReplicaWork) -> None:
        """Let a head have this in flight, and say so."""
        head = self.heads[name]
        if work.requests:
            head.in_flight[work.engine] = work
        else:
            head.in_flight.pop(work.engine, None)
        head.session.report([work], full=False)
