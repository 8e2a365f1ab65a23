"""Counters and histograms of one orchestrator. Any thread may read them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client import Histogram

from vllm_omni_plugin.errors import QueryOfDeathError
from vllm_omni_plugin.vllm_api.requests.engine_types import Move

_MAX_REASONS = 64
"""Distinct reasons that are counted. They label metrics, and a third-party policy may produce any number of them."""
_OTHER_REASON = "other"
_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)

HISTOGRAMS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "queue_time_seconds": (
        (),
        "Seconds from a request's arrival at the orchestrator to its first dispatch, including the time it is held.",
    ),
    "hold_time_seconds": ((), "Seconds that accepted requests waited because no replica could serve."),
    "stage_seconds": (
        ("stage", "name", "part"),
        "Seconds that a request through a pipeline spent in a stage, which has a `name` in the file. `transfer`: in "
        "transforms and building inputs; `queue`: until the dispatch; `first_output`: from there to the first output; "
        "`run`: from there to the end.",
    ),
}
"""Labels and meanings of the histograms, by their names without the prefix of our metrics."""


class WaitingCounts(NamedTuple):
    """Requests of one stage that wait: for any replica, for paused engines, or to be moved to another replica."""

    held: int
    paused: int
    moving: int


class OrchestratorMetrics:
    """Counters of one orchestrator since its start.

    AsyncLLM's thread writes `waiting`, `refused_before_accept` and `refused_on_arrival`; the client of the coordinator
    writes `has_session`; the orchestrator's thread writes all others.

    Attributes:
        queue_time: see `HISTOGRAMS`, as are `hold_time` and `stage_seconds`.
        moves_by_way: requests sent again to another replica because theirs was lost.
        swallowed_tokens: tokens that replays repeated and clients did not get twice.
        diverged: replays that did not repeat what had been delivered; `lost` includes them.
        lost: requests that ended with an error because their replica was lost.
        queued_in: by stage, returns how many of its requests wait at this head for the replica they are charged to.
        refused: accepted requests that were refused because no replica could serve.
        refused_before_accept: requests refused for the same reason before they were accepted.
        decisions: dispatches by stage, policy and reason.
        fallbacks: dispatches where a policy could not apply its main rule, by stage, policy and fallback.
        bubbles: times a replica had begun all its requests while others waited here for it.
        recalls: requests that waited for a replica and went to another that could begin them earlier.
        refusals: requests refused by admission, by stage, reason and HTTP status.
        refused_on_arrival: the `refusals` that were clear before the request was accepted.
        matched_tokens: prompt tokens that policies expected in the caches of the chosen replicas. Counts only attempts
            whose engine reported its cached tokens.
        cached_tokens: prompt tokens that these engines reported as cached.
        has_session: whether this head has a session with the coordinator; None without a coordinator.
        waiting: requests that are held before they are accepted.
    """

    def __init__(self) -> None:
        self.queue_time = _histogram("queue_time_seconds")
        self.hold_time = _histogram("hold_time_seconds")
        self.stage_seconds = _histogram("stage_seconds")
        self.waiting_in: dict[int, Callable[[], WaitingCounts]] = {}
        self.queued_in: dict[int, Callable[[], int]] = {}
        self.moves_by_way = dict.fromkeys((Move.RESTART, Move.RESUME, Move.REPLAY), 0)
        self.swallowed_tokens = 0
        self.diverged = 0
        self.lost = 0
        self.queries_of_death = 0
        self.refused = 0
        self.refused_before_accept = 0
        self.decisions: dict[tuple[int, str, str], int] = {}
        self.fallbacks: dict[tuple[int, str, str], int] = {}
        self.refusals: dict[tuple[int, str, str], int] = {}
        self.refused_on_arrival: dict[tuple[int, str, str], int] = {}
        self.bubbles = 0
        self.recalls = 0
        self.matched_tokens = 0
        self.cached_tokens = 0
        self.has_session: bool | None = None
        self.waiting = 0

    def observe_stage(self, stage_id: int, name: str, part: str, seconds: float) -> None:
        """Observe the time of a request in one part of a stage, see `HISTOGRAMS`."""
        self.stage_seconds.labels(str(stage_id), name, part).observe(seconds)

    def count_failure(self, error: Exception, refused: bool = False) -> None:
        """Count a request that ends with this error; `refused`: it found no replica, or no place to wait."""
        if isinstance(error, QueryOfDeathError):
            self.queries_of_death += 1
        elif refused:
            self.refused += 1
        else:
            self.lost += 1

    @property
    def held(self) -> int:
        return sum(waiting().held for waiting in self.waiting_in.values())

    @property
    def paused(self) -> int:
        return sum(waiting().paused for waiting in self.waiting_in.values())

    @property
    def queued(self) -> int:
        return sum(queued() for queued in self.queued_in.values())

    @property
    def moves_waiting(self) -> int:
        return sum(waiting().moving for waiting in self.waiting_in.values())

    @property
    def moves(self) -> int:
        return sum(self.moves_by_way.values())


def _histogram(name: str) -> Histogram:
    labels, meaning = HISTOGRAMS[name]
    # Not registered: a process may have several orchestrators, and each head's collector exports its own.
    return Histogram(f"vllm_omni_fleet:{name}", meaning, labels, buckets=_BUCKETS_S, registry=None)


def count_reason(counts: dict[tuple[int, str, str], int], key: tuple[int, str, str]) -> None:
    """Count a decision by stage, policy and reason; reasons after the first 64 count as `other`."""
    if key not in counts and len(counts) >= _MAX_REASONS:
        key = (*key[:2], _OTHER_REASON)
    counts[key] = counts.get(key, 0) + 1
