"""The heads of a fleet: who is there, and what each is to be told. Pure: what comes in returns what to send.

A connection loses nothing on its way, so a head that takes all that it is sent knows everything. One whose queue is
full is told nothing more until there is room; then it is told everything anew.
"""

from collections.abc import Iterable

from msgspec import Raw

from vllm_omni_plugin.coordinator.protocol.head_messages import (
    MAX_ERROR_CHARS,
    SESSION_PROTOCOL,
    Beat,
    Bye,
    CallRefused,
    FromHead,
    HeadLeft,
    Hello,
    KnownReplicaIds,
    OperatorCall,
    PeerWork,
    ReplicaWork,
    SessionRefused,
    Welcome,
    WorkReport,
    encode_to_head,
    frames_to_head,
)
from vllm_omni_plugin.coordinator.state.call_log import OperatorCalls, OutgoingMessages
from vllm_omni_plugin.coordinator.state.list_deltas import ListDeltas
from vllm_omni_plugin.coordinator.state.membership_table import TableFullError
from vllm_omni_plugin.errors import WireError

MAX_HEADS = 64
# Heads beat at least once a second: three beats, and two seconds.
HEAD_TIMEOUT = 5.0
# Often enough for 0.1 s from one head to another, rarely enough for many reports to share a frame.
RELAY_INTERVAL = 0.04
# A full resync is expensive.
RESYNC_INTERVAL = 0.25
# As many replicas as a table may hold, and as many again that have just started anew.
MAX_WORK_ROWS = 8192

OutgoingFrame = tuple[bytes, bytes]
"""A frame, after the connection it is for."""

_ANSWER_TO_BEAT = b"[]"


class ConnectedHead:
    """One connection of a head, and what the head has in flight, which outlives the connection.

    Attributes:
        head_id: The head's.
        peer: By which the coordinator's socket knows its connection.
        number: See `Hello`.
        heard_at: Monotonic seconds of its last word.
        synced: Whether it was told everything so far; otherwise it is told nothing before a full resync.
        synced_at: Monotonic seconds of its last full resync.
    """

    def __init__(self, hello: Hello, peer: bytes, now: float) -> None:
        self.head_id = hello.head_id
        self.heard_at = now
        self.synced_at = float("-inf")
        self._work: dict[int, ReplicaWork] = {}
        self._changed: dict[int, ReplicaWork] = {}
        self._replaced = self._has_reported = False
        self.open(hello, peer)

    def open(self, hello: Hello, peer: bytes) -> None:
        """Go on with another connection. What the head has reported stands until it reports anew."""
        self.peer = peer
        self.number = hello.session
        self.synced = False

    def report(self, work: WorkReport) -> None:
        """Take a report in. Rows of more than `MAX_WORK_ROWS` replicas are ignored."""
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
        """Whether there is something that `take_changes` would return."""
        return self._replaced or bool(self._changed)

    def take_changes(self) -> PeerWork:
        """Return what the head has reported since the last time, the last of each replica only."""
        news = self.all_work() if self._replaced else None
        news = news or PeerWork(self.head_id, False, list(self._changed.values()))
        self._changed.clear()
        self._replaced = False
        return news

    def all_work(self) -> PeerWork | None:
        """Return all that it has in flight; None if it has not said yet."""
        return PeerWork(self.head_id, True, list(self._work.values())) if self._has_reported else None


class ConnectedHeads:
    """At most `MAX_HEADS` sessions. Times are monotonic seconds.

    Args:
        lists: What heads are told of replicas.
    """

    def __init__(self, lists: ListDeltas) -> None:
        self._lists = lists
        self._sessions: dict[str, ConnectedHead] = {}
        self._by_peer: dict[bytes, ConnectedHead] = {}
        self._calls = OperatorCalls(settled=lists.has_list)
        self._relayed_at = float("-inf")

    def __len__(self) -> int:
        return len(self._sessions)

    def handle(self, peer: bytes, message: FromHead, now: float) -> list[OutgoingFrame] | None:
        """Take a message in; return the answer, or None if it is of a connection without a session.

        Raises:
            TableFullError: There is no place for another head.
            WireError: The head speaks another version, or the message cannot be passed on.
        """
        if isinstance(message, Hello):
            return self._open(peer, message, now)
        session = self._by_peer.get(peer)
        if session is None:
            return None
        session.heard_at = now
        match message:
            case Beat():
                return [(peer, _ANSWER_TO_BEAT)]
            case WorkReport():
                session.report(message)
            case KnownReplicaIds():
                self._lists.reserve(message)
            case Bye():
                return self._remove(session)
            case _:
                return self._tell(self._calls.take(session.head_id, message, list(self._sessions)))
        return []

    def mark_out_of_sync(self, peer: bytes) -> None:
        """A connection's queue is full: it is told nothing more before a full resync."""
        session = self._by_peer.get(peer)
        if session is not None:
            session.synced = False

    def connection_lost(self, peer: bytes) -> list[OutgoingFrame]:
        """A connection is gone."""
        session = self._by_peer.get(peer)
        return [] if session is None else self._remove(session)

    def broadcast(self, messages: Iterable[Raw]) -> list[OutgoingFrame]:
        """Return these messages for all heads."""
        frames = list(frames_to_head(messages))
        return [(session.peer, frame) for session in self._sessions.values() if session.synced for frame in frames]

    def tick(self, now: float) -> list[OutgoingFrame]:
        """Resync the heads that need it, and tell all what was reported, unless that was just now."""
        letters: list[OutgoingFrame] = []
        for session in self._sessions.values():
            if not session.synced and now >= session.synced_at + RESYNC_INTERVAL:
                letters += self._resync(session, now)
        if self._lists.has_list:
            letters += self._tell(self._calls.settle(list(self._sessions)))
        if now >= self._relayed_at + RELAY_INTERVAL:
            news = [
                encode_to_head(session.take_changes()) for session in self._sessions.values() if session.has_changes
            ]
            if news:
                self._relayed_at = now
                letters += self.broadcast(news)
        return letters

    def expire(self, now: float, late_by: float = 0.0) -> list[OutgoingFrame]:
        """Let those go that are silent. ``late_by``: as for `MembershipTable.expire`."""
        for session in self._sessions.values():
            session.heard_at = min(now, session.heard_at + late_by)
        silent = [session for session in self._sessions.values() if session.heard_at + HEAD_TIMEOUT <= now]
        return [letter for session in silent for letter in self._remove(session)]

    def next_deadline(self) -> float | None:
        """Return when `tick` or `expire` will next have something to do, or None if there is no head."""
        sessions = self._sessions.values()
        deadlines = [session.heard_at + HEAD_TIMEOUT for session in sessions]
        deadlines += [session.synced_at + RESYNC_INTERVAL for session in sessions if not session.synced]
        if any(session.has_changes for session in sessions):
            deadlines.append(self._relayed_at + RELAY_INTERVAL)
        return min(deadlines, default=None)

    def refusal(self, peer: bytes, message: Hello | OperatorCall, reason: str) -> OutgoingFrame:
        """What a connection is told that gets no session, or no number for a call."""
        reason = reason[:MAX_ERROR_CHARS]
        refused = SessionRefused(reason) if isinstance(message, Hello) else CallRefused(message.call_id, reason)
        (frame,) = frames_to_head([encode_to_head(refused)])
        return peer, frame

    def _open(self, peer: bytes, hello: Hello, now: float) -> list[OutgoingFrame] | None:
        if hello.protocol != SESSION_PROTOCOL:
            raise WireError(
                f"head {hello.head_id} speaks version {hello.protocol} and the coordinator version {SESSION_PROTOCOL}: "
                "all heads of a fleet need the same version of vllm-omni-plugin"
            )
        session = self._sessions.get(hello.head_id)
        if self._by_peer.get(peer, session) is not session:
            # The connection is another head's.
            return None
        if session is None:
            if len(self._sessions) >= MAX_HEADS:
                raise TableFullError(f"there are {MAX_HEADS} heads already")
            session = self._sessions[hello.head_id] = ConnectedHead(hello, peer, now)
        elif hello.session < session.number or (hello.session == session.number and peer != session.peer):
            return None
        else:
            del self._by_peer[session.peer]
            session.open(hello, peer)
            session.heard_at = now
        self._by_peer[peer] = session
        return []

    def _resync(self, session: ConnectedHead, now: float) -> list[OutgoingFrame]:
        letters = self._tell(self._calls.begins_anew(session.head_id, self._following()))
        session.synced, session.synced_at = True, now
        others = [other for other in self._sessions.values() if other is not session]
        whole_list = self._lists.full(now)
        messages = [encode_to_head(Welcome([other.head_id for other in others], starting=whole_list is None))]
        if whole_list is not None:
            messages.append(whole_list)
        messages += [encode_to_head(work) for other in others if (work := other.all_work()) is not None]
        messages.append(encode_to_head(self._calls.state))
        messages += [encode_to_head(outcome) for outcome in self._calls.outcomes_for(session.head_id)]
        return letters + [(session.peer, frame) for frame in frames_to_head(messages)]

    def _following(self) -> list[str]:
        return [session.head_id for session in self._sessions.values() if session.synced]

    def _tell(self, said: OutgoingMessages) -> list[OutgoingFrame]:
        """What heads are told of calls, unless a resync will tell them."""
        return [
            (session.peer, frame)
            for head_id, message in said
            if (session := self._sessions.get(head_id)) is not None and session.synced
            for frame in frames_to_head([encode_to_head(message)])
        ]

    def _remove(self, leaver: ConnectedHead) -> list[OutgoingFrame]:
        del self._sessions[leaver.head_id]
        del self._by_peer[leaver.peer]
        letters = self.broadcast([encode_to_head(HeadLeft(leaver.head_id))])
        letters += self._tell(self._calls.left(leaver.head_id, self._following()))
        if not self._sessions:
            # Engines that lose their last head forget what they were told.
            self._calls = OperatorCalls(settled=self._lists.has_list)
        return letters
