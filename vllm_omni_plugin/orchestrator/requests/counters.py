"""Counters and histograms of one orchestrator. Any thread may read them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client import Histogram

from vllm_omni_plugin.errors import QueryOfDeathError
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move

_MAX_REASONS = 64
"""Distinct reasons that are counted. They label metrics, and a third-party policy may produce any number of them."""
_OTHER_REASON = "other"
_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)

HISTOGRAMS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "queue_time_seconds": (
        (),
        "Seconds from a request's arrival at the orchestrator until it is first sent to an engine.",
    ),
    "hold_time_seconds": ((), "Seconds that accepted requests waited because no replica could serve."),
    "stage_seconds": (
        ("stage", "name", "part"),
        "Seconds that a request of a pipeline spent in a stage. `transfer`: building its input; `queue`: until it is "
        "sent; `first_output`: from there to the first output; `run`: from there to the end.",
    ),
}
"""Labels and meanings of the histograms, by their names without the prefix of our metrics."""


class WaitingCounts(NamedTuple):
    """Requests of one stage that wait: for any replica, for paused engines, to be moved, or for room at a replica."""

    held: int
    paused: int
    moving: int
    queued: int


class OrchestratorMetrics:
    """Counters of one orchestrator since its start.

    A field that is shown as a metric has its name; the catalogue says what it counts, and `HISTOGRAMS` what the times
    are. AsyncLLM's thread writes the fields that end in `_before_accept`: they count requests that the orchestrator has
    not got. The client of the coordinator writes `coordinator_connected`, None without a coordinator; the
    orchestrator's thread writes all others.

    `matched_tokens`, which policies expected in caches, are of the attempts whose engines reported `cached_tokens`.
    `waiting_in` returns, by stage, how many of its requests wait at this head. Replays repeated the
    `tokens_swallowed`, which clients did not get twice; `requests_failed` includes those that diverged.
    """

    def __init__(self) -> None:
        self.queue_time_seconds = _histogram("queue_time_seconds")
        self.hold_time_seconds = _histogram("hold_time_seconds")
        self.stage_seconds = _histogram("stage_seconds")
        self.waiting_in: dict[int, Callable[[], WaitingCounts]] = {}
        self.request_moves = dict.fromkeys((Move.RESTART, Move.RESUME, Move.REPLAY), 0)
        self.tokens_swallowed = 0
        self.replays_diverged = 0
        self.requests_failed = dict.fromkeys(("replica_lost", "query_of_death", "no_replica"), 0)
        self.requests_failed_before_accept = 0
        self.decisions: dict[tuple[int, str, str], int] = {}
        self.decision_fallbacks: dict[tuple[int, str, str], int] = {}
        self.requests_refused: dict[tuple[int, str, str], int] = {}
        self.requests_refused_before_accept: dict[tuple[int, str, str], int] = {}
        self.idle_while_waiting = 0
        self.matched_tokens = 0
        self.cached_tokens = 0
        self.coordinator_connected: bool | None = None
        self.held_before_accept = 0
        self.held_bytes_before_accept = 0

    def observe_stage(self, stage_id: int, name: str, part: str, seconds: float) -> None:
        """Observe the time of a request in one part of a stage, see `HISTOGRAMS`."""
        self.stage_seconds.labels(str(stage_id), name, part).observe(seconds)

    def count_failure(self, error: Exception, refused: bool = False) -> None:
        """Count a request that ends with this error; `refused`: it found no replica, or no place to wait."""
        is_query_of_death = isinstance(error, QueryOfDeathError)
        reason = "query_of_death" if is_query_of_death else "no_replica" if refused else "replica_lost"
        self.requests_failed[reason] += 1

    @property
    def held(self) -> int:
        return sum(waiting().held for waiting in self.waiting_in.values())

    @property
    def paused(self) -> int:
        return sum(waiting().paused for waiting in self.waiting_in.values())

    @property
    def queued(self) -> int:
        return sum(waiting().queued for waiting in self.waiting_in.values())

    @property
    def moves_waiting(self) -> int:
        return sum(waiting().moving for waiting in self.waiting_in.values())

    @property
    def moves(self) -> int:
        return sum(self.request_moves.values())


def _histogram(name: str) -> Histogram:
    labels, meaning = HISTOGRAMS[name]
    # Not registered: a process may have several orchestrators, and each head's collector exports its own.
    return Histogram(f"vllm_omni_fleet:{name}", meaning, labels, buckets=_BUCKETS_S, registry=None)


def count_reason(counts: dict[tuple[int, str, str], int], key: tuple[int, str, str]) -> None:
    """Count a decision by stage, policy and reason; reasons after the first 64 count as `other`."""
    if key not in counts and len(counts) >= _MAX_REASONS:
        key = (*key[:2], _OTHER_REASON)
    counts[key] = counts.get(key, 0) + 1
