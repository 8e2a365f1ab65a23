"""What a head and the coordinator have said to each other so far. Pure: frames in, frames and events out."""

from collections import deque
from collections.abc import Iterator, Sequence

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import HEAD_QUEUE_FRAMES
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    ROWS_PER_FRAME,
    SESSION_PROTOCOL,
    Beat,
    Bye,
    CallMessageFromHead,
    CallMessageToHead,
    FromHead,
    FullList,
    HeadLeft,
    Hello,
    KnownReplicaIds,
    ListDelta,
    PeerWork,
    ReplicaIdRow,
    ReplicaWork,
    SessionLost,
    SessionRefused,
    ToHead,
    Welcome,
    WorkReport,
    decode_to_head,
    encode_from_head,
)
from vllm_omni_plugin.errors import WireError

SILENCE_TIMEOUT = 2.0

SessionEvent = Welcome | FullList | ListDelta | PeerWork | HeadLeft | CallMessageToHead | SessionLost
"""What a head is told."""
SessionOutput = SessionEvent | SessionRefused | WireError
"""An event, why there is no session, or what was dropped."""


class HeadSession:
    """One head's side. Times are monotonic seconds; ``number`` of a session: see `Hello`.

    A session ends with its connection, with silence, with a frame that cannot be read, and when more than
    `HEAD_QUEUE_FRAMES` wait to be sent. Everything is then told anew, in both directions.

    Attributes:
        frames: What is to be sent while there is a connection, the first first.

    Raises:
        WireError: The coordinator would refuse this id.
    """

    def __init__(self, head_id: str) -> None:
        self._head_id = head_id
        self._number = 0
        self._heard_at: float | None = None
        self._welcomed = False
        # Of the replicas that are listed.
        self._numbers: dict[ReplicaKey, int] = {}
        self.frames: deque[bytes] = deque()
        self.open(0)

    def open(self, number: int) -> None:
        """Ask for a session, since there is a new connection or this one is of no use. What was to be sent is not."""
        self._number = max(number, self._number + 1)
        self._welcomed = False
        self._say_hello()

    def disconnected(self) -> None:
        """Send nothing until there is another connection."""
        self._welcomed = False

    def beat(self) -> None:
        """Say that the head is there; ask again for a session where there is none."""
        if self._welcomed:
            self._add(Beat())
        else:
            self._say_hello()

    def report(self, work: Sequence[ReplicaWork], full: bool) -> None:
        """Tell of work that changed, or with ``full`` of all there is."""
        for start in range(0, len(work) or 1, ROWS_PER_FRAME):
            if self._welcomed:
                self._add(WorkReport(full and start == 0, list(work[start : start + ROWS_PER_FRAME])))

    def send(self, message: CallMessageFromHead) -> bool:
        """Return whether there is a session to send it in."""
        if self._welcomed:
            self._add(message)
        return self._welcomed

    def leave(self) -> None:
        """Say that the head leaves."""
        self.frames.append(encode_from_head(Bye()))
        self._welcomed = False

    def check_silence(self, now: float, number: int) -> list[SessionOutput]:
        """See to what time alone brings: silence, after which another session begins."""
        if self._heard_at is None or now - self._heard_at < SILENCE_TIMEOUT:
            return []
        self._heard_at = None
        self.open(number)
        return [SessionLost()]

    def receive(self, frame: bytes, now: float) -> list[SessionOutput]:
        """Take in a frame of the coordinator."""
        try:
            messages = decode_to_head(frame)
        except WireError as error:
            # Whatever it said is missing now. The next beat asks for everything.
            self._welcomed = False
            return [error]
        news = [news for message in messages for news in self._take(message)]
        if self._welcomed:
            # A coordinator that gives this head no session tells it nothing of the others.
            self._heard_at = now
        return news

    def _take(self, message: ToHead) -> Iterator[SessionOutput]:
        match message:
            case Welcome():
                self._welcomed = True
                if message.starting:
                    self._report_numbers()
                yield message
            case SessionRefused():
                yield message
            case _ if not self._welcomed:
                # It is what was left of another session.
                return
            case FullList() | ListDelta():
                self._note_numbers(message)
                yield message
            case PeerWork() if message.head_id == self._head_id:
                return
            case _:
                yield message

    def _note_numbers(self, news: FullList | ListDelta) -> None:
        if isinstance(news, FullList):
            self._numbers.clear()
        else:
            for key in news.removed:
                self._numbers.pop(key, None)
        self._numbers |= {ReplicaKey.of(row): row.replica_id for row in (*news.replicas, *news.no_new_work)}

    def _report_numbers(self) -> None:
        numbers = [ReplicaIdRow(*key, number) for key, number in self._numbers.items() if number >= 0]
        for start in range(0, len(numbers), ROWS_PER_FRAME):
            self._add(KnownReplicaIds(numbers[start : start + ROWS_PER_FRAME]))

    def _say_hello(self) -> None:
        self.frames.clear()
        self.frames.append(encode_from_head(Hello(self._head_id, self._number, SESSION_PROTOCOL)))

    def _add(self, message: FromHead) -> None:
        """Send a message. Raises `WireError` if the coordinator would refuse it."""
        frame = encode_from_head(message)
        if len(self.frames) < HEAD_QUEUE_FRAMES:
            self.frames.append(frame)
        else:
            self.open(0)
