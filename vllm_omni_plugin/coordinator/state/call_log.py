"""Operators' calls at the coordinator: numbers, who has yet to follow, and the state that they leave. Pure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import asdict, replace

from vllm_omni_plugin.coordinator.protocol.call_arguments import FORGET_LORA, MANAGE_CALLS, decode
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
_NOT_REPEATED = MANAGE_CALLS | {FORGET_LORA, "collective_rpc"}
"""What is not sent to engines, and what may not be done twice."""
_OF_ADAPTERS = frozenset({"add_lora", "pin_lora", "remove_lora"})

OutgoingMessages = list[tuple[str, CallMessageToHead]]
"""Messages, after the head that each is for."""


@dataclass(eq=False, slots=True)
class _OpenCall:
    call: NumberedCall
    settle: list[Callable[[bool], None]]
    outcome: CallOutcome | None = None
    waiting: set[str] = field(default_factory=set)


class OperatorCalls:
    """Gives each call its number, and keeps a snapshot for heads that come later.

    A call is open from its number until all heads that were there at its outcome have done their part, or left. One
    whose caller leaves before the outcome is made again by another head if it may be made twice and no later one
    could be undone by that; otherwise it counts as taken.

    Args:
        settled: Whether calls get numbers now. They wait until `settle` where the coordinator has just started, since a
            head that has followed more calls than the others may still come, and what it knows replaces all else.
    """

    def __init__(self, settled: bool = True) -> None:
        self._settled = settled
        self._early: list[tuple[str, OperatorCall]] = []
        self._number = 0
        self._last_lasting = 0
        self._stages: dict[int, SharedState] = {}
        self._drained: set[ReplicaKey] = set()
        self._open: dict[int, _OpenCall] = {}

    @property
    def state(self) -> FleetState:
        """The snapshot."""
        stages = [stage.snapshot(stage_id) for stage_id, stage in self._stages.items()]
        return FleetState(self._number, stages, sorted(self._drained))

    def take(self, head_id: str, message: CallMessageFromHead, heads: Sequence[str]) -> OutgoingMessages:
        """Take in what a head says of calls.

        Args:
            head_id: The head.
            message: What it says.
            heads: All that there are, this one among them.

        Raises:
            WireError: It is no such message. Nothing has changed.
        """
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

    def settle(self, heads: Sequence[str]) -> OutgoingMessages:
        """Number the calls that have waited, and all others from now on as they come. ``heads``: as for `take`."""
        self._settled = True
        early, self._early = self._early, []
        return [said for head_id, call in early for said in self._call(head_id, call, heads)]

    def left(self, head_id: str, others: Sequence[str]) -> OutgoingMessages:
        """A head follows no longer. ``others``: who still follows."""
        said = self.begins_anew(head_id, others)
        for number in list(self._open):
            said += self._done(number, head_id)
        return said

    def begins_anew(self, head_id: str, others: Sequence[str]) -> OutgoingMessages:
        """A head knows nothing of its own calls any more. ``others``: who else follows."""
        self._early = [early for early in self._early if early[0] != head_id]
        said: OutgoingMessages = []
        for number, open_call in list(self._open.items()):
            call = open_call.call
            if call.head_id != head_id:
                continue
            if open_call.outcome is not None:
                del self._open[number]
            elif others and self._may_repeat(call):
                open_call.call = replace(call, head_id=others[0], called_engines=[])
                said.append((others[0], TakeOverCall(open_call.call)))
            else:
                said += self._end(open_call, CallOutcome(number, [True] * len(call.stages)), others)
        return said

    def outcomes_for(self, head_id: str) -> list[CallOutcome]:
        """The outcomes that a head has yet to follow which has the snapshot, so that what was taken is not said."""
        return [
            replace(open_call.outcome, taken=[])
            for open_call in self._open.values()
            if open_call.outcome is not None and head_id in open_call.waiting
        ]

    def _call(self, head_id: str, call: OperatorCall, heads: Sequence[str]) -> OutgoingMessages:
        args = decode(call.method, call.arguments)
        require_flat(call.arguments)
        if len(self._open) + len(self._early) >= MAX_OPEN_CALLS:
            reason = f"{MAX_OPEN_CALLS} calls are under way. Please try again later."
            return [(head_id, CallRefused(call.call_id, reason))]
        if not self._settled:
            self._early.append((head_id, call))
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
        said: OutgoingMessages = [(head, outcome) for head in open_call.waiting]
        return said + self._finish(open_call)

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
        """This coordinator has started after the call that the head saw last."""
        if state.number <= self._number:
            return []
        stages = {stage.stage_id: SharedState() for stage in state.stages}
        for stage in state.stages:
            stages[stage.stage_id].adopt(stage)
        self._number, self._stages = state.number, stages
        self._drained = set(state.drained)
        return [(head, self.state) for head in heads if head != head_id]


def update_drained(action: str, key: ReplicaKey, drained: set[ReplicaKey]) -> None:
    """Keep in mind which replicas an operator holds back."""
    if action == "drain":
        drained.add(key)
    else:
        drained.discard(key)
