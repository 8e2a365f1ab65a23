"""The head's side of a session, without sockets or clocks: frames in, frames and events out."""

from collections import deque
from collections.abc import Iterator, Sequence

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
    HeadWork,
    Hello,
    ListDelta,
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

SessionEvent = Welcome | FullList | ListDelta | HeadWork | HeadLeft | CallMessageToHead | SessionLost
SessionOutput = SessionEvent | SessionRefused | WireError
"""An event, the reason of a missing session, or the fault of a dropped frame."""


class HeadSession:
    """One session after the other. Times are monotonic seconds; ``number`` of a session: see `Hello`.

    A session ends with its connection, after `SILENCE_TIMEOUT`, with an invalid frame, and when more than
    `HEAD_QUEUE_FRAMES` wait to be sent. A full resync in both directions follows. ``frames`` are to be sent while there
    is a connection. ``generation``: see `Hello`. Raises `WireError` if the coordinator would refuse the id.
    """

    def __init__(self, head_id: str, generation: str = "") -> None:
        self._head_id = head_id
        self._generation = generation
        self._number = 0
        self._last_frame_at: float | None = None
        self._is_open = False
        self.frames: deque[bytes] = deque()
        self.open(0)

    def open(self, number: int) -> None:
        """Request a new session. Frames of the previous one are not sent."""
        self._number = max(number, self._number + 1)
        self._is_open = False
        self._send_hello()

    def disconnected(self) -> None:
        self._is_open = False

    def beat(self) -> None:
        """Send a heartbeat, or request a session where there is none."""
        if self._is_open:
            self._add(Beat())
        else:
            self._send_hello()

    def report(self, work: Sequence[ReplicaWork], full: bool) -> None:
        for start in range(0, len(work) or 1, ROWS_PER_FRAME):
            if self._is_open:
                self._add(WorkReport(full and start == 0, list(work[start : start + ROWS_PER_FRAME])))

    def send(self, message: CallMessageFromHead) -> bool:
        """Send a message. Returns False, and sends none, without a session."""
        if self._is_open:
            self._add(message)
        return self._is_open

    def leave(self) -> None:
        self.frames.append(encode_from_head(Bye()))
        self._is_open = False

    def check_silence(self, now: float, number: int) -> list[SessionOutput]:
        """Request a new session if the coordinator has been silent for `SILENCE_TIMEOUT`."""
        if self._last_frame_at is None or now - self._last_frame_at < SILENCE_TIMEOUT:
            return []
        self._last_frame_at = None
        self.open(number)
        return [SessionLost()]

    def receive(self, frame: bytes, now: float) -> list[SessionOutput]:
        try:
            messages = decode_to_head(frame)
        except WireError as error:
            # The content is lost. The next beat requests a new session and with it a full resync.
            self._is_open = False
            return [error]
        outputs = [output for message in messages for output in self._handle(message)]
        if self._is_open:
            # Frames without a session, such as refusals, do not count: other heads' work is unknown without one.
            self._last_frame_at = now
        return outputs

    def _handle(self, message: ToHead) -> Iterator[SessionOutput]:
        match message:
            case Welcome():
                self._is_open = True
                yield message
            case SessionRefused():
                yield message
            case _ if not self._is_open:
                # It belongs to a previous session.
                return
            case HeadWork() if message.head_id == self._head_id:
                return
            case _:
                yield message

    def _send_hello(self) -> None:
        self.frames.clear()
        self.frames.append(encode_from_head(Hello(self._head_id, self._number, SESSION_PROTOCOL, self._generation)))

    def _add(self, message: FromHead) -> None:
        frame = encode_from_head(message)
        if len(self.frames) < HEAD_QUEUE_FRAMES:
            self.frames.append(frame)
        else:
            self.open(0)
