"""What a head has yet to send to the coordinator, in order and numbered."""

from collections import deque
from collections.abc import Sequence

from vllm_omni_plugin.coordinator.head_messages import (
    MAX_ERROR_CHARS,
    ROWS_PER_FRAME,
    SEAT_PROTOCOL,
    Answer,
    Beat,
    FromHead,
    Numbers,
    ReplicaNumber,
    ReplicaWork,
    Work,
)
from vllm_omni_plugin.coordinator.head_wire import encode_from_head
from vllm_omni_plugin.coordinator.sockets import HEAD_QUEUE_FRAMES
from vllm_omni_plugin.errors import WireError


class HeadOutbox:
    """At most `HEAD_QUEUE_FRAMES` frames; of more the oldest are dropped, which the coordinator sees by the numbers.

    Raises:
        WireError: The coordinator would refuse this id.

    Attributes:
        frames: What is to be sent, the first first.
        has_seat: Whether there is somebody to report to. Without a seat reports are not kept, since the next one begins
            with a full report.
    """

    def __init__(self, head_id: str) -> None:
        self._head_id = head_id
        self._seat = 0
        self._work_sequence = 0
        self.frames: deque[bytes] = deque(maxlen=HEAD_QUEUE_FRAMES)
        self.has_seat = False
        self.take_seat(0)

    def take_seat(self, number: int) -> None:
        """Ask for a seat, greater than those before. What was to be sent before is of no use any more."""
        self._seat = max(number, self._seat + 1)
        self.has_seat = False
        self.frames.clear()
        self.beat(anew=True)

    def beat(self, *, anew: bool) -> None:
        """Say that the head is there. ``anew``: see `Beat`."""
        if not self.has_seat:
            self.frames.clear()
        self.add(Beat(self._head_id, self._seat, self._work_sequence, anew, SEAT_PROTOCOL))

    def report(self, work: Sequence[ReplicaWork], full: bool) -> None:
        """Say what is in flight, in as many frames as it takes."""
        if not self.has_seat:
            return
        for start in range(0, len(work) or 1, ROWS_PER_FRAME):
            self._work_sequence += 1
            part = list(work[start : start + ROWS_PER_FRAME])
            self.add(Work(self._work_sequence, full and start == 0, part))

    def number(self, numbers: Sequence[ReplicaNumber]) -> None:
        """Say by which numbers replicas are known."""
        for start in range(0, len(numbers), ROWS_PER_FRAME):
            self.add(Numbers(list(numbers[start : start + ROWS_PER_FRAME])))

    def answer(self, answer: Answer) -> None:
        """Answer a call; with an error if the coordinator would refuse the answer."""
        try:
            self.add(answer)
        except WireError as error:
            self.add(Answer(answer.head_id, answer.call_id, error=str(error)[:MAX_ERROR_CHARS]))

    def add(self, message: FromHead) -> None:
        """Send a message. Raises `WireError` if the coordinator would refuse it."""
        self.frames.append(encode_from_head(message))
