"""Sends all requests of a session to one replica, unless that is much busier than the others."""

import random
from collections.abc import Sequence

from msgspec.structs import replace

from vllm_omni_plugin.balancing.caches.rendezvous import RendezvousTable
from vllm_omni_plugin.balancing.interface import (
    Candidate,
    DecidingBalancer,
    Decision,
    ReplicaView,
    Task,
    require_replicas,
)
from vllm_omni_plugin.balancing.policies.least_queue_length import LeastQueueLengthBalancer
from vllm_omni_plugin.balancing.policy_options import number
from vllm_omni_plugin.balancing.sampling import queue_lengths_of

_ATTEMPTS = 16


class SessionBalancer(DecidingBalancer):
    """Consistent hashing with bounded loads.

    A session belongs to one replica, see `RendezvousTable`. If that has more unfinished requests than
    `load_factor * (total + 1) / replicas + slack`, the request goes to the next replica in the session's own order that
    has not; so a session always spills to the same replica. Without a session, or if the first sixteen replicas in that
    order are too busy, the shortest queue wins.

    Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018). Each session has its own
    order, after Chen, Coleman and Shrivastava, "Revisiting Consistent Hashing with Bounded Loads" (2021).

    Reasons: `session`, `session-spilled`, `least-load`. Fallback: `no-session`. docs/policies.md has the options.
    """

    def __init__(self, *, load_factor: float = 1.25, slack: float = 4, rng: random.Random | None = None) -> None:
        self._load_factor = number("load_factor", load_factor, 1, 100)
        self._slack = number("slack", slack, 0)
        self._least_load = LeastQueueLengthBalancer(rng)
        self._table = RendezvousTable()

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """The session's replica up to its bound, else the next one; without a session the shortest queue."""
        require_replicas(replicas)
        session = task.get("session")
        if not session:
            return replace(self._least_load.decide(task, replicas), fallback="no-session")
        self._table.set_replicas(replicas)
        key = session.encode(errors="surrogatepass")
        lengths = queue_lengths_of(replicas)
        bound = self._load_factor * (sum(lengths) + 1) / len(replicas) + self._slack
        candidates: list[Candidate] = []
        for attempt in range(_ATTEMPTS):
            position = self._table.position(key, attempt)
            candidates.append(Candidate(position, lengths[position]))
            if candidates[-1].score <= bound:
                return Decision(position, "session-spilled" if attempt else "session", tuple(candidates))
        return replace(self._least_load.decide(task, replicas), reason="session-spilled")
