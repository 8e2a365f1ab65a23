"""The coordinator's side of the sessions with heads, without sockets: messages in, frames to send out.

A connection loses no frames. If a head's send queue is full, the coordinator stops sending to it. Once there is room
again it sends a full resync.
"""

from collections.abc import Iterable

from msgspec import Raw

from vllm_omni_plugin.coordinator.protocol import head_messages as wire
from vllm_omni_plugin.coordinator.protocol.control_messages import is_compatible
from vllm_omni_plugin.coordinator.state.list_deltas import ListDeltas
from vllm_omni_plugin.coordinator.state.membership_table import TableFullError
from vllm_omni_plugin.coordinator.state.relayed_calls import OutgoingMessages, RelayedCalls
from vllm_omni_plugin.errors import WireError

MAX_HEADS = 64
# Three beats, which come at least every second, and two seconds.
HEAD_TIMEOUT = 5.0
# Work reaches the other heads within 0.1 s, and many reports share a frame.
RELAY_INTERVAL = 0.04
# A full resync is expensive.
RESYNC_INTERVAL = 0.25
# A full membership table, and as many replicas again whose previous incarnation is still listed.
MAX_WORK_ROWS = 8192

OutgoingFrame = tuple[bytes, bytes]
"""The ROUTER's id of a connection, and a frame for it."""

_ANSWER_TO_BEAT = b"[]"


class ConnectedHead:
    """One head of a generation: its connection (``peer``: the ROUTER's id of it), and its work, which outlives that.

    A head that is not ``synced`` gets nothing before a full resync.
    """

    def __init__(self, hello: wire.Hello, generation: str, peer: bytes, now: float) -> None:
        self.head_id = hello.head_id
        self.generation = generation
        self.last_message_at = now
        self.synced_at = float("-inf")
        self._work: dict[int, wire.ReplicaWork] = {}
        self._changed: dict[int, wire.ReplicaWork] = {}
        self._replaced = self._has_reported = False
        self.open(hello, peer)

    def open(self, hello: wire.Hello, peer: bytes) -> None:
        """Use another connection. The reported work remains until the head reports again."""
        self.peer = peer
        self.session = hello.session
        self.synced = False

    def report(self, work: wire.WorkReport) -> None:
        """Store a report. Rows beyond `MAX_WORK_ROWS` are ignored."""
        if work.full:
            self._work.clear()
            self._changed.clear()
            self._replaced = self._has_reported = True
        for row in work.work:
            if row.engine in self._work or len(self._work) + len(self._changed) < MAX_WORK_ROWS:
                self._changed[row.engine] = row
                if row.requests:
                    self._work[row.engine] = row
                else:
                    self._work.pop(row.engine, None)

    @property
    def has_changes(self) -> bool:
        return self._replaced or bool(self._changed)

    def take_changes(self) -> wire.HeadWork:
        """Return the changes since the last call; of each replica only the last report."""
        changes = self.all_work() if self._replaced else None
        changes = changes or wire.HeadWork(self.head_id, False, list(self._changed.values()))
        self._changed.clear()
        self._replaced = False
        return changes

    def all_work(self) -> wire.HeadWork | None:
        """Return all work in flight; None before the first full report."""
        return wire.HeadWork(self.head_id, True, list(self._work.values())) if self._has_reported else None


class ConnectedHeads:
    """At most `MAX_HEADS` heads. Times are monotonic seconds.

    All get the same list. All else, from the ids of other heads to the document, stays within a generation: another
    one has other replicas. ``generation`` is that of heads that name none.
    """

    def __init__(self, lists: ListDeltas, generation: str = "") -> None:
        self._lists = lists
        self._default_generation = generation
        self._heads: dict[str, ConnectedHead] = {}
        self._by_peer: dict[bytes, ConnectedHead] = {}
        # By generation, while it has heads.
        self._calls: dict[str, RelayedCalls] = {}
        # Before its first list, a new coordinator waits for heads with a later state.
        self._tells_state = lists.has_list
        self._relayed_at = float("-inf")

    def __len__(self) -> int:
        return len(self._heads)

    def handle(self, peer: bytes, message: wire.FromHead, now: float) -> list[OutgoingFrame] | None:
        """Handle a message and return the answers, or None if the connection has no session.

        Raises `TableFullError` at `MAX_HEADS` heads, and `WireError` for an invalid message or another version.
        """
        if isinstance(message, wire.Hello):
            return self._open(peer, message, now)
        head = self._by_peer.get(peer)
        if head is None:
            return None
        head.last_message_at = now
        match message:
            case wire.Beat():
                return [(peer, _ANSWER_TO_BEAT)]
            case wire.WorkReport():
                head.report(message)
            case wire.Bye():
                return self._head_left(head)
            case _:
                synced = [other.head_id for other in self._heads_of(head.generation) if other.synced]
                return self._encode(self._calls[head.generation].handle(head.head_id, message, synced))
        return []

    def mark_out_of_sync(self, peer: bytes) -> None:
        """The send queue of a connection is full: send nothing more before a full resync."""
        if peer in self._by_peer:
            self._by_peer[peer].synced = False

    def connection_lost(self, peer: bytes) -> list[OutgoingFrame]:
        return self._head_left(self._by_peer[peer]) if peer in self._by_peer else []

    def broadcast(self, messages: Iterable[Raw], generation: str | None = None) -> list[OutgoingFrame]:
        """Frames for all heads, or for those of a generation."""
        frames = list(wire.frames_to_head(messages))
        return [(head.peer, frame) for head in self._heads_of(generation) if head.synced for frame in frames]

    def tick(self, now: float) -> list[OutgoingFrame]:
        """Resync the heads that need it, and relay reported work at most every `RELAY_INTERVAL`."""
        frames: list[OutgoingFrame] = []
        for head in self._heads.values():
            if not head.synced and now >= head.synced_at + RESYNC_INTERVAL:
                frames += self._resync(head, now)
        if self._lists.has_list and not self._tells_state:
            self._tells_state = True
            for generation, calls in self._calls.items():
                frames += self.broadcast([wire.encode_to_head(calls.state)], generation)
        if now >= self._relayed_at + RELAY_INTERVAL:
            for generation in self._calls:
                changed = [head for head in self._heads_of(generation) if head.has_changes]
                if changed:
                    self._relayed_at = now
                    frames += self.broadcast([wire.encode_to_head(head.take_changes()) for head in changed], generation)
        return frames

    def expire(self, now: float, late_by: float = 0.0) -> list[OutgoingFrame]:
        """Remove silent heads. ``late_by``: as for `MembershipTable.expire`."""
        for head in self._heads.values():
            head.last_message_at = min(now, head.last_message_at + late_by)
        silent = [head for head in self._heads.values() if head.last_message_at + HEAD_TIMEOUT <= now]
        return [frame for head in silent for frame in self._head_left(head)]

    def next_deadline(self) -> float | None:
        """Return the next time at which `tick` or `expire` has something to do; None without heads."""
        heads = self._heads.values()
        deadlines = [head.last_message_at + HEAD_TIMEOUT for head in heads]
        deadlines += [head.synced_at + RESYNC_INTERVAL for head in heads if not head.synced]
        if any(head.has_changes for head in heads):
            deadlines.append(self._relayed_at + RELAY_INTERVAL)
        return min(deadlines, default=None)

    def refusal(self, peer: bytes, message: wire.Hello | wire.FleetCall, reason: str) -> OutgoingFrame:
        reason = reason[: wire.MAX_ERROR_CHARS]
        refused = (
            wire.SessionRefused(reason)
            if isinstance(message, wire.Hello)
            else wire.CallRefused(message.call_id, reason)
        )
        (frame,) = wire.frames_to_head([wire.encode_to_head(refused)])
        return peer, frame

    def _open(self, peer: bytes, hello: wire.Hello, now: float) -> list[OutgoingFrame] | None:
        """Give a head a session, unless it has a later one; over `MAX_HEADS` or of another version it is refused."""
        if not is_compatible(hello.protocol, wire.SESSION_PROTOCOL, wire.OLDEST_SESSION_PROTOCOL):
            raise WireError(
                f"head {hello.head_id} speaks version {hello.protocol} and the coordinator version "
                f"{wire.SESSION_PROTOCOL}: their versions of vllm-omni-plugin are more than two apart"
            )
        head = self._heads.get(hello.head_id)
        if self._by_peer.get(peer, head) is not head:
            # The connection belongs to another head.
            return None
        if head is None:
            if len(self._heads) >= MAX_HEADS:
                raise TableFullError(f"there are {MAX_HEADS} heads already")
            head = ConnectedHead(hello, hello.generation or self._default_generation, peer, now)
            self._heads[hello.head_id] = head
            self._calls.setdefault(head.generation, RelayedCalls())
        elif hello.session < head.session or (hello.session == head.session and peer != head.peer):
            return None
        else:
            del self._by_peer[head.peer]
            head.open(hello, peer)
            head.last_message_at = now
        self._by_peer[peer] = head
        return []

    def _resync(self, head: ConnectedHead, now: float) -> list[OutgoingFrame]:
        """Send a head everything anew: the list, other heads' work, and what operators have decided."""
        calls = self._calls[head.generation]
        frames = self._encode(calls.head_resynced(head.head_id))
        head.synced, head.synced_at = True, now
        others = [other for other in self._heads_of(head.generation) if other is not head]
        full_list = self._lists.full_list(now)
        messages = [wire.encode_to_head(wire.Welcome([other.head_id for other in others]))]
        if full_list is not None:
            messages.append(full_list)
        messages += [wire.encode_to_head(work) for other in others if (work := other.all_work()) is not None]
        if self._tells_state:
            messages.append(wire.encode_to_head(calls.state))
        return frames + [(head.peer, frame) for frame in wire.frames_to_head(messages)]

    def _heads_of(self, generation: str | None) -> list[ConnectedHead]:
        return [head for head in self._heads.values() if generation in (None, head.generation)]

    def _encode(self, messages: OutgoingMessages) -> list[OutgoingFrame]:
        """Return the frames for synced heads. The others get the content with their resync."""
        return [
            (head.peer, frame)
            for head_id, message in messages
            if (head := self._heads.get(head_id)) is not None and head.synced
            for frame in wire.frames_to_head([wire.encode_to_head(message)])
        ]

    def _head_left(self, head: ConnectedHead) -> list[OutgoingFrame]:
        """Forget a head; with the last one of its generation also what operators have decided there."""
        del self._heads[head.head_id]
        del self._by_peer[head.peer]
        frames = self.broadcast([wire.encode_to_head(wire.HeadLeft(head.head_id))], head.generation)
        frames += self._encode(self._calls[head.generation].head_resynced(head.head_id))
        if not self._heads_of(head.generation):
            # Engines are reset when their last head has left.
            del self._calls[head.generation]
        return frames
