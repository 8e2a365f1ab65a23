"""Calls of this head that are not answered by all yet."""

from concurrent.futures import Future
from typing import NamedTuple

from vllm_omni_plugin.coordinator.deliveries import Answered
from vllm_omni_plugin.coordinator.head_messages import PeerAnswer
from vllm_omni_plugin.errors import OmniError


class NoSeatError(OmniError):
    """The coordinator cannot be reached, or did not pass a call on. Whether a head has got it is not known."""


class Settled(NamedTuple):
    """A call that has come to its end."""

    future: "Future[list[PeerAnswer]]"
    outcome: list[PeerAnswer] | NoSeatError

    def tell(self) -> None:
        """Let the caller know."""
        if isinstance(self.outcome, NoSeatError):
            self.future.set_exception(self.outcome)
        else:
            self.future.set_result(self.outcome)


class _Call:
    def __init__(self, future: "Future[list[PeerAnswer]]", deadline: float) -> None:
        self.future = future
        self.deadline = deadline
        self.missing: set[str] | None = None
        self.answers: list[PeerAnswer] = []


class PendingCalls:
    """Returns what has come to its end, for the owner to tell. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}

    def open(self, call_id: int, deadline: float) -> "Future[list[PeerAnswer]]":
        """Begin a call; return what will hold one answer of each other head."""
        future: Future[list[PeerAnswer]] = Future()
        # So that nobody can cancel it, and its end can always be told.
        future.set_running_or_notify_cancel()
        self._calls[call_id] = _Call(future, deadline)
        return future

    def sent(self, call_id: int, heads: list[str]) -> list[Settled]:
        """Note which heads a call went to."""
        call = self._calls.get(call_id)
        if call is None or call.missing is not None:
            return []
        call.missing = set(heads)
        return self._settled(call_id, call)

    def answered(self, answer: Answered) -> list[Settled]:
        """Take in an answer."""
        return self._take(answer.call_id, PeerAnswer(answer.head_id, answer.result, answer.error))

    def left(self, head_id: str) -> list[Settled]:
        """Expect nothing more of a head."""
        answer = PeerAnswer(head_id, error="it has left")
        return [settled for call_id in list(self._calls) for settled in self._take(call_id, answer)]

    def expire(self, now: float) -> list[Settled]:
        """End the calls whose time is over."""
        settled = []
        for call_id, call in [item for item in self._calls.items() if item[1].deadline <= now]:
            if call.missing is None:
                del self._calls[call_id]
                settled.append(Settled(call.future, NoSeatError("the coordinator did not pass the call on in time")))
                continue
            for head_id in sorted(call.missing):
                settled += self._take(call_id, PeerAnswer(head_id, error="it did not answer in time"))
        return settled

    def end(self, why: str) -> list[Settled]:
        """End all calls."""
        settled = [Settled(call.future, NoSeatError(why)) for call in self._calls.values()]
        self._calls.clear()
        return settled

    def next_deadline(self) -> float | None:
        """Return when `expire` will next have something to do, or None if there is no call."""
        return min((call.deadline for call in self._calls.values()), default=None)

    def _take(self, call_id: int, answer: PeerAnswer) -> list[Settled]:
        call = self._calls.get(call_id)
        if call is None or call.missing is None or answer.head_id not in call.missing:
            return []
        call.missing.remove(answer.head_id)
        call.answers.append(answer)
        return self._settled(call_id, call)

    def _settled(self, call_id: int, call: _Call) -> list[Settled]:
        if call.missing:
            return []
        del self._calls[call_id]
        return [Settled(call.future, call.answers)]
