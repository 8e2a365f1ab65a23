"""Operator calls at the coordinator: passed on from head to head, and the fleet's document with them."""

from collections.abc import Sequence

from msgspec.structs import asdict

from vllm_omni_plugin.coordinator.protocol import head_messages as wire
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState, is_later

MAX_OPEN_CALLS = 1024

OutgoingMessages = list[tuple[str, wire.CallMessageToHead]]
"""Pairs of a head's id and a message for it."""


class RelayedCalls:
    """Passes calls on to all heads, and tells the caller when all others have done their part or left.

    ``state`` is the document. A head that changes it must have known this one; the head is told otherwise.
    """

    def __init__(self) -> None:
        self.state = FleetState()
        # By caller and call id: the heads that have not done their part.
        self._waiting: dict[tuple[str, int], set[str]] = {}

    def handle(self, head_id: str, message: wire.CallMessageFromHead, heads: Sequence[str]) -> OutgoingMessages:
        """Handle a message. ``heads``: ids of all synced heads. Raises `WireError` if it is nested too deeply."""
        match message:
            case FleetState():
                if not is_later(message, self.state):
                    return []
                self.state = message
                return [(head, message) for head in heads if head != head_id]
            case wire.CallDone():
                return self._done(message.head_id, message.call_id, head_id)
            case wire.FleetCall():
                return self._pass_on(head_id, message, heads)

    def head_resynced(self, head_id: str) -> OutgoingMessages:
        """A head has left, or has lost the messages that were sent to it."""
        self._waiting = {key: heads for key, heads in self._waiting.items() if key[0] != head_id}
        waiting = list(self._waiting)
        return [message for caller, call_id in waiting for message in self._done(caller, call_id, head_id)]

    def _pass_on(self, head_id: str, call: wire.FleetCall, heads: Sequence[str]) -> OutgoingMessages:
        """Pass a call to the other heads; refused if it is based on another version of the document than the latest."""
        wire.require_flat(call.arguments)
        if len(self._waiting) >= MAX_OPEN_CALLS:
            reason = f"{MAX_OPEN_CALLS} calls are under way. Please try again later."
            return [(head_id, wire.CallRefused(call.call_id, reason))]
        if call.state is not None:
            if (call.base_version, call.base_head) != (self.state.version, self.state.head_id):
                return [(head_id, self.state), (head_id, wire.CallRefused(call.call_id, "", is_outdated=True))]
            self.state = call.state
        # The caller does not do a part.
        self._waiting[head_id, call.call_id] = {*heads, head_id}
        passed_on = wire.RelayedCall(**asdict(call), head_id=head_id)
        return [*((head, passed_on) for head in heads), *self._done(head_id, call.call_id, head_id)]

    def _done(self, caller: str, call_id: int, head_id: str) -> OutgoingMessages:
        waiting = self._waiting.get((caller, call_id))
        if waiting is None or head_id not in waiting:
            return []
        waiting.discard(head_id)
        if waiting:
            return []
        del self._waiting[caller, call_id]
        return [(caller, wire.CallFinished(call_id))]
