"""What a head and the coordinator have said to each other so far. Pure: frames in, frames and news out."""

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from vllm_omni_plugin.coordinator.deliveries import (
    Answered,
    CallSent,
    Delivery,
    HeadLeft,
    NumbersWanted,
    Refused,
    Seated,
    ToHead,
)
from vllm_omni_plugin.coordinator.head_listener import SeatLost, Told
from vllm_omni_plugin.coordinator.head_messages import (
    MAX_ERROR_CHARS,
    Answer,
    Bye,
    Call,
    PeerAnswer,
    PeerCall,
    ReplicaWork,
)
from vllm_omni_plugin.coordinator.head_outbox import HeadOutbox
from vllm_omni_plugin.coordinator.head_view import HeadView, Notice
from vllm_omni_plugin.coordinator.head_wire import decode_delivery, decode_to_head
from vllm_omni_plugin.coordinator.pending_calls import NoSeatError, PendingCalls, Settled
from vllm_omni_plugin.errors import WireError

SEAT_TIMEOUT = 2.0

News = Told | Settled | Refused | WireError
"""What the listener is told, a call that has come to its end, that there is no seat, or what was dropped."""


class HeadSession:
    """One head's side. Times are monotonic seconds; ``number`` of a seat: greater than that of any seat before.

    Attributes:
        frames: What is to be sent while there is a connection, the first first.

    Raises:
        WireError: The coordinator would refuse this id.
    """

    def __init__(self, head_id: str) -> None:
        self._outbox = HeadOutbox(head_id)
        self._view = HeadView()
        self._calls = PendingCalls()
        self._call_ids = itertools.count(1)
        self._heard_at: float | None = None
        self.frames: deque[bytes] = self._outbox.frames

    def connected(self, number: int) -> None:
        """Take a seat: there is a new connection."""
        self._view.in_step = False
        self._outbox.take_seat(number)

    def disconnected(self) -> None:
        """Send nothing until there is another connection."""
        self._outbox.has_seat = False

    def beat(self) -> None:
        """Say that the head is there, and whether it has missed anything."""
        self._outbox.beat(anew=not self._view.in_step)

    def report(self, work: Sequence[ReplicaWork], full: bool) -> None:
        """See `OmniCoordClientForHead.report_work`."""
        self._outbox.report(work, full)

    def call(self, method: str, arguments: Any, deadline: float) -> "Future[list[PeerAnswer]]":
        """See `OmniCoordClientForHead.call`."""
        message = Call(next(self._call_ids), method, arguments)
        if not self._outbox.has_seat:
            refused: Future[list[PeerAnswer]] = Future()
            refused.set_exception(NoSeatError("there is no connection to the coordinator"))
            return refused
        self._outbox.add(message)
        return self._calls.open(message.call_id, deadline)

    def answer(self, call: PeerCall, result: Any, error: str) -> None:
        """See `OmniCoordClientForHead.answer`."""
        if self._outbox.has_seat:
            self._outbox.answer(Answer(call.head_id, call.call_id, result, error[:MAX_ERROR_CHARS]))

    def leave(self) -> list[Settled]:
        """Say that the head leaves; all its calls end."""
        self._outbox.add(Bye())
        self._outbox.has_seat = False
        return self._calls.end("this head is leaving")

    def watch(self, now: float, number: int) -> list[News]:
        """See to what time alone brings: calls without an answer, and silence, after which another seat is taken."""
        news: list[News] = [*self._calls.expire(now)]
        if self._heard_at is not None and now - self._heard_at >= SEAT_TIMEOUT:
            self._heard_at = None
            self._view.lose()
            self._outbox.take_seat(number)
            news.append(SeatLost())
        return news

    def next_deadline(self) -> float | None:
        """Return when a call will be over, or None if there is none."""
        return self._calls.next_deadline()

    def take(self, frame: bytes, now: float) -> list[News]:
        """Take in a frame of the coordinator."""
        try:
            delivery = decode_delivery(frame)
        except WireError as error:
            return [error]
        messages, news = _decoded(delivery)
        self._heard_at = now
        was_in_step = self._view.in_step
        notices = self._view.take(delivery, messages)
        seated = next((message for message in messages if isinstance(message, Seated)), None)
        if seated is not None:
            self._outbox.has_seat = True
            news.append(seated)
        elif was_in_step and not self._view.in_step:
            self._outbox.beat(anew=True)
        for notice in notices:
            news += self._heed(notice)
        return news

    def _heed(self, notice: Notice) -> list[News]:
        match notice:
            case NumbersWanted():
                self._outbox.number(self._view.numbers())
                return []
            case CallSent():
                return [*self._calls.sent(notice.call_id, notice.heads)]
            case Answered():
                return [*self._calls.answered(notice)]
            case HeadLeft():
                return [*self._calls.left(notice.head_id), notice]
        return [notice]


def _decoded(delivery: Delivery) -> tuple[list[ToHead], list[News]]:
    """Return the messages of a delivery that are valid, and what is wrong with the others."""
    messages: list[ToHead] = []
    dropped: list[News] = []
    for message in delivery.messages:
        try:
            messages.append(decode_to_head(message))
        except WireError as error:
            dropped.append(error)
    return messages, dropped
