"""Which head holds which output slot of an engine, and until when: a pure table without sockets or clocks."""

import itertools
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Lease:
    """One head's right to one output slot.

    Attributes:
        lease_id: names it on the wire; never used twice.
        slot: index of the slot, which is the head's `client_index`.
        peer: ZMQ routing id of the control connection on which it was granted. It is good on that connection only.
        head_id: which head.
        ends_at: when it ends, unless its holder gives a sign of life before.
    """

    lease_id: int
    slot: int
    peer: bytes
    head_id: str
    ends_at: float


class Leases:
    """The slots of one engine. Times are monotonic seconds given by the caller.

    A slot whose lease ended is not free before `cleaned`: until then outputs of the former holder may come on it. The
    lowest free slot is taken, since slot 0 needs no further ports.

    Args:
        slots: how many there are.
        timeout: seconds without a beat after which a lease ends.
    """

    def __init__(self, slots: int, timeout: float) -> None:
        self._slots = slots
        self._free = set(range(slots))
        self._timeout = timeout
        self._ids = itertools.count(1)
        self._leases: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def current(self) -> list[Lease]:
        """All leases, oldest first; a copy."""
        return list(self._leases.values())

    def superseded(self, peer: bytes, head_id: str) -> list[Lease]:
        """The leases that this head still has from an earlier attachment. It attaches anew because it lost them."""
        return [lease for lease in self.current if lease.peer == peer or lease.head_id == head_id]

    def grant(self, peer: bytes, head_id: str, now: float) -> Lease | None:
        """Give a free slot to a head, or None if there is none."""
        if not self._free:
            return None
        slot = min(self._free)
        self._free.discard(slot)
        lease = Lease(next(self._ids), slot, peer, head_id, now + self._timeout)
        self._leases[lease.lease_id] = lease
        return lease

    def find(self, lease_id: int, peer: bytes) -> Lease | None:
        """The lease of that number if it is this peer's, else None."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.peer == peer else None

    def beat(self, lease: Lease, now: float) -> None:
        """Its holder is there."""
        lease.ends_at = now + self._timeout

    def expired(self, now: float, late_by: float = 0.0) -> list[Lease]:
        """The leases whose holders were silent for too long; the caller ends them.

        `late_by`: seconds by which the caller itself comes later than it meant to. Beats may have waited unread for as
        long, so all leases get that much more time.
        """
        for lease in self._leases.values():
            lease.ends_at += late_by
        return [lease for lease in self.current if lease.ends_at <= now]

    def end(self, lease: Lease) -> bool:
        """Take a lease back; False if it had ended before. Its slot is free after `cleaned`."""
        return self._leases.pop(lease.lease_id, None) is not None

    def cleaned(self, slot: int) -> None:
        """Nothing of its former holder can come on a slot any more."""
        self._free.add(slot)

    def all_clean(self) -> None:
        """A new engine: all slots are free. No lease may be left."""
        self._free = set(range(self._slots))
