"""Which head holds which output slot of an engine, and until when: a table without sockets or clocks."""

import itertools
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Lease:
    """One head's right to use one output slot, its `client_index`, by one control connection, the routing id `peer`.

    `lease_id` is never reused.
    """

    lease_id: int
    slot: int
    peer: bytes
    head_id: str
    ends_at: float


class Leases:
    """The slots of one engine. Times are monotonic seconds given by the caller.

    The slot of an ended lease is not free before `free`: outputs of its former head may still arrive on it. The lowest
    free slot is used first, since slot 0 needs no further ports. A lease ends if it is not renewed within `timeout`.
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
        return [lease for lease in self.current if lease.peer == peer or lease.head_id == head_id]

    def grant(self, peer: bytes, head_id: str, now: float) -> Lease | None:
        if not self._free:
            return None
        slot = min(self._free)
        self._free.discard(slot)
        lease = Lease(next(self._ids), slot, peer, head_id, now + self._timeout)
        self._leases[lease.lease_id] = lease
        return lease

    def find(self, lease_id: int, peer: bytes) -> Lease | None:
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.peer == peer else None

    def renew(self, lease: Lease, now: float) -> None:
        lease.ends_at = now + self._timeout

    def expired(self, now: float, late_by: float = 0.0) -> list[Lease]:
        """The leases that were not renewed in time.

        All leases are extended by `late_by`, the seconds by which the caller is late: renewals may have waited unread.
        """
        for lease in self._leases.values():
            lease.ends_at += late_by
        return [lease for lease in self.current if lease.ends_at <= now]

    def end(self, lease: Lease) -> bool:
        """False if the lease had ended before."""
        return self._leases.pop(lease.lease_id, None) is not None

    def free(self, slot: int) -> None:
        """Make a slot available: no output of its former head can arrive any more."""
        self._free.add(slot)

    def free_all(self) -> None:
        """Make all slots available, for a new engine. There must be no lease."""
        self._free = set(range(self._slots))
