"""Operator calls at the coordinator: their numbers, the heads that must still do their part, the resulting state."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import asdict, replace

from vllm_omni_plugin.coordinator.protocol.call_arguments import HEAD_CALLS, MANAGE_CALLS, decode
from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    CallDone,
    CallFinished,
    CallMessageFromHead,
    CallMessageToHead,
    CallOutcome,
    CallRefused,
    FleetState,
    NumberedCall,
    OperatorCall,
    TakeOverCall,
    require_flat,
)
from vllm_omni_plugin.coordinator.state.shared_state import SharedState
from vllm_omni_plugin.errors import WireError

MAX_OPEN_CALLS = 1024
# Not sent to engines, or not idempotent.
_NOT_REPEATED = MANAGE_CALLS | HEAD_CALLS | {"collective_rpc"}
_OF_ADAPTERS = frozenset({"add_lora", "pin_lora", "remove_lora"})

OutgoingMessages = list[tuple[str, CallMessageToHead]]
"""Pairs of a head's id and a message for it."""


@dataclass(eq=False, slots=True)
class _OpenCall:
    call: NumberedCall
    settle: list[Callable[[bool], None]]
    outcome: CallOutcome | None = None
    waiting: set[str] = field(default_factory=set)


class OperatorCalls:
    """Numbers the calls, and keeps a snapshot for heads that come later.

    A call is open from its number until all heads that were connected at its outcome have done their part or left. If
    its caller leaves before the outcome, another head repeats the call, provided that it may be made twice and undoes
    no later call. Otherwise the call counts as accepted.

    Args:
        numbering: Whether calls get numbers at once. After a start of the coordinator they wait for `start_numbering`,
            because a head with a newer snapshot may still connect, and that snapshot replaces this one.
    """

    def __init__(self, numbering: bool = True) -> None:
        self._numbering = numbering
        self._unnumbered: list[tuple[str, OperatorCall]] = []
        self._number = 0
        self._last_lasting = 0
        self._stages: dict[int, SharedState] = {}
        self._drained: set[ReplicaKey] = set()
        self._open: dict[int, _OpenCall] = {}

    @property
    def state(self) -> FleetState:
        """The snapshot for heads."""
        stages = [stage.snapshot(stage_id) for stage_id, stage in self._stages.items()]
        return FleetState(self._number, stages, sorted(self._drained))

    def handle(self, head_id: str, message: CallMessageFromHead, heads: Sequence[str]) -> OutgoingMessages:
        """Handle a message. ``heads``: ids of all heads. Raises `WireError` if it is invalid, and changes nothing."""
        match message:
            case OperatorCall():
                return self._call(head_id, message, heads)
            case CallOutcome():
                open_call = self._open.get(message.number)
                if open_call is None or open_call.outcome is not None or open_call.call.head_id != head_id:
                    return []
                if len(message.taken) != len(open_call.call.stages):
                    raise WireError(f"the outcome of a call of {len(open_call.call.stages)} stages has another number")
                return self._end(open_call, message, heads)
            case CallDone():
                return self._done(message.number, head_id)
            case FleetState():
                return self._adopt(head_id, message, heads)

    def start_numbering(self, heads: Sequence[str]) -> OutgoingMessages:
        """Number the waiting calls, and from now on all calls at once. ``heads``: ids of all heads."""
        self._numbering = True
        waiting, self._unnumbered = self._unnumbered, []
        return [outgoing for head_id, call in waiting for outgoing in self._call(head_id, call, heads)]

    def head_left(self, head_id: str, others: Sequence[str]) -> OutgoingMessages:
        """Remove a head. ``others``: ids of the other synced heads."""
        outgoing = self.head_resynced(head_id, others)
        for number in list(self._open):
            outgoing += self._done(number, head_id)
        return outgoing

    def head_resynced(self, head_id: str, others: Sequence[str]) -> OutgoingMessages:
        """End the open calls of a head that has lost them. ``others``: ids of the other synced heads."""
        self._unnumbered = [waiting for waiting in self._unnumbered if waiting[0] != head_id]
        outgoing: OutgoingMessages = []
        for number, open_call in list(self._open.items()):
            call = open_call.call
            if call.head_id != head_id:
                continue
            if open_call.outcome is not None:
                del self._open[number]
            elif others and self._may_repeat(call):
                open_call.call = replace(call, head_id=others[0], called_engines=[])
                outgoing.append((others[0], TakeOverCall(open_call.call)))
            else:
                outgoing += self._end(open_call, CallOutcome(number, [True] * len(call.stages)), others)
        return outgoing

    def pending_outcomes(self, head_id: str) -> list[CallOutcome]:
        """Return the outcomes of which a head must still do its part. ``taken`` is empty: the snapshot contains it."""
        return [
            replace(open_call.outcome, taken=[])
            for open_call in self._open.values()
            if open_call.outcome is not None and head_id in open_call.waiting
        ]

    def _call(self, head_id: str, call: OperatorCall, heads: Sequence[str]) -> OutgoingMessages:
        args = decode(call.method, call.arguments)
        require_flat(call.arguments)
        if len(self._open) + len(self._unnumbered) >= MAX_OPEN_CALLS:
            reason = f"{MAX_OPEN_CALLS} calls are under way. Please try again later."
            return [(head_id, CallRefused(call.call_id, reason))]
        if not self._numbering:
            self._unnumbered.append((head_id, call))
            return []
        self._number += 1
        stages = [self._stages.setdefault(stage_id, SharedState()) for stage_id in call.stages]
        settle = [stage.record(call.method, args) for stage in stages]
        if any(stage.leaves_state(call.method, args) for stage in stages):
            self._last_lasting = self._number
        if call.method in MANAGE_CALLS:
            update_drained(call.method, args[0], self._drained)
        numbered = NumberedCall(**asdict(call), number=self._number, head_id=head_id)
        self._open[self._number] = _OpenCall(numbered, settle)
        return [(head, numbered) for head in heads]

    def _end(self, open_call: _OpenCall, outcome: CallOutcome, heads: Collection[str]) -> OutgoingMessages:
        for settle, taken in zip(open_call.settle, outcome.taken, strict=True):
            settle(taken)
        open_call.outcome = outcome
        open_call.waiting = {head for head in heads if head != open_call.call.head_id}
        return [*((head, outcome) for head in open_call.waiting), *self._finish(open_call)]

    def _done(self, number: int, head_id: str) -> OutgoingMessages:
        open_call = self._open.get(number)
        if open_call is None:
            return []
        open_call.waiting.discard(head_id)
        return self._finish(open_call)

    def _finish(self, open_call: _OpenCall) -> OutgoingMessages:
        if open_call.outcome is None or open_call.waiting:
            return []
        del self._open[open_call.call.number]
        return [(open_call.call.head_id, CallFinished(open_call.call.number))]

    def _may_repeat(self, call: NumberedCall) -> bool:
        is_last = call.number == self._last_lasting
        return call.method not in _NOT_REPEATED and (is_last or call.method in _OF_ADAPTERS)

    def _adopt(self, head_id: str, state: FleetState, heads: Sequence[str]) -> OutgoingMessages:
        """Replace the snapshot by that of a head if it is newer, as after a restart of the coordinator."""
        if state.number <= self._number:
            return []
        stages = {stage.stage_id: SharedState() for stage in state.stages}
        for stage in state.stages:
            stages[stage.stage_id].adopt(stage)
        self._number, self._stages = state.number, stages
        self._drained = set(state.drained)
        return [(head, self.state) for head in heads if head != head_id]


def update_drained(action: str, key: ReplicaKey, drained: set[ReplicaKey]) -> None:
    """Update the set of drained replicas with a call of `MANAGE_CALLS`."""
    if action == "drain":
        drained.add(key)
    else:
        drained.discard(key)
