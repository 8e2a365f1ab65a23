"""Round-robin that stays fair when replicas join, leave and come back."""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from vllm_omni_plugin.balancing.interface import (
    DecidingBalancer,
    Decision,
    ReplicaView,
    Task,
    identity_of,
    require_replicas,
    snapshot_of,
)
from vllm_omni_plugin.balancing.policy_options import whole

_Identity = tuple[int, str, str]


class RoundRobinBalancer(DecidingBalancer):
    """Picks the least recently picked replica, independent of its index. Thread-safe.

    All known replicas form one queue. A new replica enters at the front, and a picked one moves to the back. So in no
    period does a replica get two picks more than another one that is live throughout. A departed replica keeps its
    place until it reaches the front, where it is dropped; so leaving and coming back gains nothing. A pick is O(1) for
    the same tuple as before. The reason is `turn`; there is no fallback.

    `start_index` is the index of the first pick, modulo the number of replicas.
    """

    def __init__(self, start_index: int = 0) -> None:
        self._start_index = whole("start_index", start_index)
        self._lock = Lock()
        self._queue: OrderedDict[_Identity, None] = OrderedDict()
        self._live: dict[_Identity, int] = {}
        self._seen: tuple[ReplicaView, ...] = ()

    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        """Return the index of the next replica, and count this as its pick."""
        with self._lock:
            identity = self._next(replicas)
            self._queue.move_to_end(identity)
            return self._live[identity]

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        with self._lock:
            identity = self._next(replicas)
            return Decision(self._live[identity], "turn")

    def assigned(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """The replica is next again after all others, also if this policy did not choose it."""
        with self._lock:
            identity = identity_of(replica)
            if identity in self._queue:
                self._queue.move_to_end(identity)

    def _next(self, replicas: Sequence[ReplicaView]) -> _Identity:
        """The serving replica whose last turn was longest ago."""
        require_replicas(replicas)
        snapshot = snapshot_of(replicas)
        if snapshot is not self._seen:
            self._update_membership(snapshot)
            self._seen = snapshot
        while (identity := next(iter(self._queue))) not in self._live:
            del self._queue[identity]
        return identity

    def _update_membership(self, snapshot: tuple[ReplicaView, ...]) -> None:
        """Replicas that have joined come first, in their order; those that left lose their place only when reached."""
        identities: list[_Identity] = [identity_of(replica) for replica in snapshot]
        start = 0 if self._queue else self._start_index % len(identities)
        for identity in reversed(identities[start:] + identities[:start]):
            if identity not in self._queue:
                self._queue[identity] = None
                self._queue.move_to_end(identity, last=False)
        self._live = {identity: index for index, identity in enumerate(identities)}
