"""What a head is told at its seat, and how it is told."""

from collections.abc import Sequence
from typing import Protocol

from vllm_omni_plugin.coordinator.deliveries import HeadLeft, PeerWork, Seated, WorkWanted
from vllm_omni_plugin.coordinator.head_messages import PeerCall, ReplicaWork
from vllm_omni_plugin.coordinator.messages import ReplicaList


class HeadListener(Protocol):
    """Called in the client's own thread, one call after the other; must not block."""

    def seat_taken(self) -> None:
        """The seat is new, or deliveries were missed, calls maybe among them: everything follows anew."""

    def replicas_listed(self, replicas: ReplicaList) -> None:
        """Take the next list. ``last_heartbeat`` of a row is of when the row last changed."""

    def work_reported(self, head_id: str, work: Sequence[ReplicaWork], full: bool) -> None:
        """Take what another head has in flight: all of it (``full``), or what changed (0 requests: none any more)."""

    def head_left(self, head_id: str) -> None:
        """Forget another head: it has left, or has been silent."""

    def called(self, call: PeerCall) -> None:
        """Take a call, to be answered with `OmniCoordClientForHead.answer`."""

    def work_wanted(self) -> None:
        """Report in full: the coordinator does not know all that is in flight here."""

    def seat_lost(self) -> None:
        """Forget what other heads reported: there is no word of the coordinator. The last list stands."""


class SeatLost:
    """There is no word of the coordinator."""


Told = Seated | ReplicaList | PeerWork | HeadLeft | PeerCall | WorkWanted | SeatLost


def tell(listener: HeadListener, told: Told) -> None:
    """Call the method that is for what is told."""
    match told:
        case Seated():
            listener.seat_taken()
        case ReplicaList():
            listener.replicas_listed(told)
        case PeerWork():
            listener.work_reported(told.head_id, told.work, told.full)
        case HeadLeft():
            listener.head_left(told.head_id)
        case PeerCall():
            listener.called(told)
        case WorkWanted():
            listener.work_wanted()
        case SeatLost():
            listener.seat_lost()
