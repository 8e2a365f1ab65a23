"""What the orchestrator counts, in plain numbers and histograms that any thread may read."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client import Histogram

from vllm_omni_plugin.errors import QueryOfDeathError
from vllm_omni_plugin.vllm_api.requests.engine_types import Move

_MAX_REASONS = 64
"""Reasons and fallbacks that are told apart. They label metrics, and a third party's policy may invent any number."""
_OTHER_REASON = "other"
_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)

HISTOGRAMS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "queue_time_seconds": (
        (),
        "Seconds from a request's arrival at the orchestrator to its first dispatch; what it is held for counts.",
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
    """Requests of one stage that wait to be sent.

    Attributes:
        held: for a replica that serves.
        paused: because engines are paused and refuse them.
        moving: for their turn to move, since their replica is lost.
    """

    held: int
    paused: int
    moving: int


class OrchestratorMetrics:
    """Counters of one orchestrator since its start.

    Attributes:
        queue_time: seconds between the submission of a request and its first dispatch.
        hold_time: seconds that requests waited because no replica served, each time they had to.
        moves_by_way: requests sent again to another replica because theirs was lost, by how they went on there.
        swallowed_tokens: tokens that replays repeated and nobody got a second time.
        diverged: replays that did not repeat what had been delivered; these are among `lost`.
        lost: requests that ended with an error because their replica was lost.
        queries_of_death: requests that ended with an error because engines seemed to die of them.
        waiting_in: by stage, says how many of its requests wait now.
        queued_in: by stage, says how many of its requests wait at this head for the replica they are charged to.
        refused: requests refused because no replica could serve, after they had been accepted.
        refused_before_accept: requests refused for the same reason before that.
        decisions: dispatches by stage, policy and reason.
        fallbacks: those among them that a policy decided by something less than its rule, by stage, policy and what.
        bubbles: times a replica had begun all it had got while requests waited here for it.
        recalls: requests that waited for a replica and went to another one, which could begin them earlier.
        refusals: requests that found the queue full, waited too long or whose tenant was at a limit, by stage,
            reason and status of HTTP.
        refused_on_arrival: those of whom that was clear before they were accepted, in the same way.
        matched_tokens: prompt tokens that policies expected to be cached where they sent them, of the attempts whose
            engine said how many were.
        cached_tokens: prompt tokens that these engines said they had cached.
        stage_seconds: what requests spent in stages of a pipeline, by its id and name and by part: `transfer`,
            `queue`, `first_output`, `run`; see `OrchestratorRequestState.pipeline_timings`.
        has_session: whether the coordinator answers this head; None where there is none. Written by its client's.
        waiting: requests that are held for that reason now, before that. It, `refused_before_accept` and
            `refused_on_arrival` are written by AsyncLLM's thread, all else by ours.
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
        """Count what a request has spent in one part of a stage."""
        self.stage_seconds.labels(str(stage_id), name, part).observe(seconds)

    def count_failure(self, error: Exception, refused: bool = False) -> None:
        """Count a request that ends with this error; `refused`: because it waited in vain, or might not wait."""
        if isinstance(error, QueryOfDeathError):
            self.queries_of_death += 1
        elif refused:
            self.refused += 1
        else:
            self.lost += 1

    @property
    def held(self) -> int:
        """Requests that wait for a replica now, whatever their stage."""
        return sum(waiting().held for waiting in self.waiting_in.values())

    @property
    def paused(self) -> int:
        """Requests that wait for paused engines now, whatever their stage."""
        return sum(waiting().paused for waiting in self.waiting_in.values())

    @property
    def queued(self) -> int:
        """Requests that wait at this head for the replica they are charged to, whatever their stage."""
        return sum(queued() for queued in self.queued_in.values())

    @property
    def moves_waiting(self) -> int:
        """Requests that wait for their turn to move, whatever their stage."""
        return sum(waiting().moving for waiting in self.waiting_in.values())

    @property
    def moves(self) -> int:
        """All moves, whatever their way."""
        return sum(self.moves_by_way.values())


def _histogram(name: str) -> Histogram:
    labels, meaning = HISTOGRAMS[name]
    # In no registry: a process may have several orchestrators, and each head's collector shows its own.
    return Histogram(f"vllm_omni_fleet:{name}", meaning, labels, buckets=_BUCKETS_S, registry=None)


def count_reason(counts: dict[tuple[int, str, str], int], key: tuple[int, str, str]) -> None:
    """Count a decision by stage, policy and reason; reasons beyond the first 64 as one."""
    if key not in counts and len(counts) >= _MAX_REASONS:
        key = (*key[:2], _OTHER_REASON)
    counts[key] = counts.get(key, 0) + 1
