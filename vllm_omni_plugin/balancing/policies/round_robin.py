"""Round-robin that stays fair while replicas join, leave and come back."""

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from threading import Lock

from vllm_omni_plugin.balancing.interface import DecidingBalancer, Decision, ReplicaView, Task, require_replicas
from vllm_omni_plugin.balancing.policy_options import whole

_Identity = tuple[int, str, str]
_identity_of = attrgetter("stage_id", "input_addr", "output_addr")


class RoundRobinBalancer(DecidingBalancer):
    """Serves the replica whose last turn is longest ago, wherever it stands in the sequence. Thread-safe.

    All known replicas form one queue: a joiner enters at the front, the one served moves to the back, and nothing else
    changes their order. So between two turns of one replica every other that is live has moved from before it to
    behind it, that is, has had its turn: in no window does any replica get two picks more than one that stays live.
    Leaving and coming back gains nothing, since a departed replica keeps its place until it is the first of the queue;
    there it is forgotten without loss, because as a joiner it would enter at that very place.

    A pick is O(1) when it is given the same tuple as the one before, else O(replicas). Memory is bounded by the live
    replicas and those that have left since the longest waiting live one was served.

    The reason of its decisions is `turn`; there is no fallback.

    Args:
        start_index: which of the first `replicas` is served first, modulo their number.

    Raises:
        ConfigError: `start_index` is not a whole number.
    """

    def __init__(self, start_index: int = 0) -> None:
        self._start_index = whole("start_index", start_index)
        self._lock = Lock()
        self._queue: OrderedDict[_Identity, None] = OrderedDict()
        self._live: dict[_Identity, int] = {}
        self._seen: tuple[ReplicaView, ...] = ()

    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        """Return the index of the replica whose turn it is, and take that for its turn.

        Raises:
            ValueError: `replicas` is empty.
        """
        with self._lock:
            identity = self._next(replicas)
            self._queue.move_to_end(identity)
            return self._live[identity]

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """Say whose turn it is; `dispatched` ends the turn. Raises ValueError when `replicas` is empty."""
        with self._lock:
            identity = self._next(replicas)
            return Decision(self._live[identity], "turn")

    def dispatched(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """The replica has had its turn, even if another was chosen."""
        with self._lock:
            identity = _identity_of(replica)
            if identity in self._queue:
                self._queue.move_to_end(identity)

    def __repr__(self) -> str:
        with self._lock:
            live, departed = len(self._live), len(self._queue) - len(self._live)
        return f"<RoundRobinBalancer [{live} live, {departed} departed]>"

    def _next(self, replicas: Sequence[ReplicaView]) -> _Identity:
        require_replicas(replicas)
        # A copy of what the caller may change in place.
        snapshot = replicas if isinstance(replicas, tuple) else tuple(replicas)
        if snapshot is not self._seen:
            self._update_membership(snapshot)
            self._seen = snapshot
        while (identity := next(iter(self._queue))) not in self._live:
            del self._queue[identity]
        return identity

    def _update_membership(self, snapshot: tuple[ReplicaView, ...]) -> None:
        identities: list[_Identity] = [_identity_of(replica) for replica in snapshot]
        start = 0 if self._queue else self._start_index % len(identities)
        for identity in reversed(identities[start:] + identities[:start]):
            if identity not in self._queue:
                self._queue[identity] = None
                self._queue.move_to_end(identity, last=False)
        self._live = {identity: index for index, identity in enumerate(identities)}
