"""Drains a head: it takes no new requests, and finishes those it has."""

from collections.abc import MutableSequence

from vllm_omni_plugin.orchestrator.event_log import EventKind, EventLog
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON, CORDON_REASONS

DRAINING = "This server is drained by an operator and takes no new requests. Please send it to another one."
"""The message of requests that are refused meanwhile."""


class HeadDrain:
    """Whether an operator drains this head, with all API servers of its command. `begin` and `end` are idempotent."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._flag: MutableSequence[int] = [0]

    @property
    def active(self) -> bool:
        return bool(self._flag[0])

    def use_shared_flag(self, flag: MutableSequence[int]) -> None:
        """Use a flag that all API servers of one command share: 0 if the head is not drained."""
        self._flag = flag

    def begin(self) -> None:
        if not self.active:
            self._flag[0] = 1
            self._events.record(EventKind.DRAIN, CORDON_REASONS[ADMIN_CORDON][0])

    def end(self) -> None:
        if self.active:
            self._flag[0] = 0
            self._events.record(EventKind.RESUME, CORDON_REASONS[ADMIN_CORDON][1])
