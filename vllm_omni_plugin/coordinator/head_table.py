"""The heads of a fleet: who is there, and what each is owed of what the others and the list of replicas say.

Pure: what comes in returns what to send. A delivery that does not arrive is a gap in its seat's numbers, on which the
head asks to be told everything again; so nothing is kept for heads that are slow.
"""

from collections.abc import Iterable

from msgspec import Raw

from vllm_omni_plugin.coordinator.deliveries import (
    Answered,
    CallSent,
    Delivery,
    HeadLeft,
    NumbersWanted,
    Refused,
    Seated,
    WorkWanted,
)
from vllm_omni_plugin.coordinator.editions import ListEditions
from vllm_omni_plugin.coordinator.head_messages import SEAT_PROTOCOL, Answer, Beat, Call, PeerCall, Work
from vllm_omni_plugin.coordinator.head_wire import DELIVERY_BYTES, encode_delivery, encode_passed_on, encode_to_head
from vllm_omni_plugin.coordinator.membership import TableFullError
from vllm_omni_plugin.coordinator.seat import Seat
from vllm_omni_plugin.errors import WireError

MAX_HEADS = 64
# Heads beat at least once a second: three beats, and two seconds.
HEAD_TIMEOUT = 5.0
# Often enough for 0.1 s from one head to another, rarely enough for many reports to share a delivery.
RELAY_INTERVAL = 0.04
# Telling everything is dear, and asked for again with the next beat.
TELL_INTERVAL = 0.25

Letter = tuple[bytes, bytes]
"""A frame, after the connection it is for."""


class HeadTable:
    """At most `MAX_HEADS` seats. Times are monotonic seconds.

    Args:
        epoch: Of this coordinator.
        editions: What heads are told of replicas.
    """

    def __init__(self, epoch: int, editions: ListEditions) -> None:
        self._epoch = epoch
        self._editions = editions
        self._seats: dict[str, Seat] = {}
        self._peers: dict[bytes, Seat] = {}
        self._relayed_at = float("-inf")

    def __len__(self) -> int:
        return len(self._seats)

    def has_seat(self, peer: bytes) -> bool:
        """Whether a connection has a seat."""
        return peer in self._peers

    def beat(self, peer: bytes, beat: Beat, now: float) -> list[Letter] | None:
        """Take a beat in; return the answer, or None if it is of a connection that has lost its seat to another.

        Raises:
            TableFullError: There is no seat for another head.
            WireError: The head speaks another version than the coordinator.
        """
        if beat.protocol != SEAT_PROTOCOL:
            raise WireError(
                f"head {beat.head_id} speaks version {beat.protocol} and the coordinator version {SEAT_PROTOCOL}: all "
                "heads of a fleet need the same version of vllm-omni-plugin"
            )
        seat = self._sit(peer, beat, now)
        if seat is None:
            return None
        seat.heard_at = now
        seat.in_step = seat.in_step and beat.work_sequence == seat.work_sequence
        messages = []
        if beat.anew and now - seat.told_at >= TELL_INTERVAL:
            seat.told_at = now
            messages += self._everything(seat)
        if not seat.in_step:
            messages.append(_WORK_WANTED)
        return self._letters(seat, messages) or [self._letter(seat, [])]

    def refusal(self, peer: bytes, reason: str) -> Letter:
        """What a connection is told that gets no seat."""
        return peer, encode_delivery(Delivery(self._epoch, 0, [encode_to_head(Refused(reason))]))

    def work(self, peer: bytes, work: Work) -> list[Letter] | None:
        """Take a report in, for `relay`. None, here and below: the connection has no seat."""
        seat = self._peers.get(peer)
        if seat is None:
            return None
        was_in_step = seat.in_step
        if not seat.report(work) and was_in_step:
            return self._letters(seat, [_WORK_WANTED])
        return []

    def call(self, peer: bytes, call: Call) -> list[Letter] | None:
        """Pass a call on to all other heads. Raises `WireError` if it cannot be."""
        caller = self._peers.get(peer)
        if caller is None:
            return None
        others = self._others(caller)
        passed = encode_passed_on(PeerCall(caller.head_id, call.call_id, call.method, call.arguments))
        sent = encode_to_head(CallSent(call.call_id, [seat.head_id for seat in others]))
        return [*self._letters(caller, [sent]), *(self._letter(seat, [passed]) for seat in others)]

    def answer(self, peer: bytes, answer: Answer) -> list[Letter] | None:
        """Pass an answer on to the head that called, if it is still there. Raises `WireError` if it cannot be."""
        seat, caller = self._peers.get(peer), self._seats.get(answer.head_id)
        if seat is None or caller is None:
            return None if seat is None else []
        passed = encode_passed_on(Answered(seat.head_id, answer.call_id, answer.result, answer.error))
        return self._letters(caller, [passed])

    def leave(self, peer: bytes) -> list[Letter] | None:
        """Let the head of a connection go."""
        seat = self._peers.get(peer)
        return None if seat is None else self._remove(seat)

    def announce(self, edition: Raw) -> list[Letter]:
        """Tell all heads of the next list."""
        return [self._letter(seat, [edition]) for seat in self._seats.values()]

    def relay(self, now: float) -> list[Letter]:
        """Tell all heads what the others have reported since the last time, unless that was just now."""
        if now < self._relayed_at + RELAY_INTERVAL:
            return []
        news = {seat.head_id: encode_to_head(seat.take_news()) for seat in self._seats.values() if seat.has_news}
        if news:
            self._relayed_at = now
        return [
            letter
            for seat in self._seats.values()
            for letter in self._letters(seat, [work for head_id, work in news.items() if head_id != seat.head_id])
        ]

    def expire(self, now: float, late_by: float = 0.0) -> list[Letter]:
        """Let those go that are silent. ``late_by``: as for `MembershipTable.expire`."""
        for seat in self._seats.values():
            seat.heard_at = min(now, seat.heard_at + late_by)
        silent = [seat for seat in self._seats.values() if seat.heard_at + HEAD_TIMEOUT <= now]
        return [letter for seat in silent for letter in self._remove(seat)]

    def next_deadline(self) -> float | None:
        """Return when `relay` or `expire` will next have something to do, or None if there is no head."""
        seats = self._seats.values()
        deadlines = [seat.heard_at + HEAD_TIMEOUT for seat in seats]
        if any(seat.has_news for seat in seats):
            deadlines.append(self._relayed_at + RELAY_INTERVAL)
        return min(deadlines, default=None)

    def _sit(self, peer: bytes, beat: Beat, now: float) -> Seat | None:
        seat = self._seats.get(beat.head_id)
        if self._peers.get(peer, seat) is not seat or (seat is not None and beat.seat < seat.number):
            return None
        if seat is None:
            if len(self._seats) >= MAX_HEADS:
                raise TableFullError(f"there are {MAX_HEADS} heads already")
            seat = self._seats[beat.head_id] = Seat(beat.head_id, peer, beat.seat, now)
        elif beat.seat > seat.number:
            del self._peers[seat.peer]
            seat.move(peer, beat.seat)
        elif seat.peer != peer:
            return None
        self._peers[peer] = seat
        return seat

    def _everything(self, seat: Seat) -> list[Raw]:
        others = self._others(seat)
        edition = self._editions.full()
        return [
            encode_to_head(Seated([other.head_id for other in others])),
            _NUMBERS_WANTED if edition is None else edition,
            *(encode_to_head(other.all_work()) for other in others if other.has_reported),
        ]

    def _remove(self, leaver: Seat) -> list[Letter]:
        del self._seats[leaver.head_id]
        del self._peers[leaver.peer]
        left = encode_to_head(HeadLeft(leaver.head_id))
        return [self._letter(seat, [left]) for seat in self._seats.values()]

    def _others(self, seat: Seat) -> list[Seat]:
        return [other for other in self._seats.values() if other is not seat]

    def _letters(self, seat: Seat, messages: Iterable[Raw]) -> list[Letter]:
        """Return deliveries with these messages, of a limited size each unless one message is larger."""
        letters: list[Letter] = []
        batch: list[Raw] = []
        size = 0
        for message in messages:
            if batch and size + len(message) > DELIVERY_BYTES:
                letters.append(self._letter(seat, batch))
                batch, size = [], 0
            batch.append(message)
            size += len(message)
        return [*letters, self._letter(seat, batch)] if batch else letters

    def _letter(self, seat: Seat, messages: list[Raw]) -> Letter:
        seat.sequence += 1
        return seat.peer, encode_delivery(Delivery(self._epoch, seat.sequence, messages))


_WORK_WANTED = encode_to_head(WorkWanted())
_NUMBERS_WANTED = encode_to_head(NumbersWanted())
