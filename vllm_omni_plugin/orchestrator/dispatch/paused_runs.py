"""Runs that paused engines refuse: each goes to another replica, back to its client, or waits for the pause to end."""

from collections.abc import Callable, Collection

from vllm_omni_plugin.orchestrator.dispatch.hold_queue import MAX_HELD_REQUESTS
from vllm_omni_plugin.orchestrator.dispatch.suspects import Suspects
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

RETRY_S = 0.5
"""Seconds after which a waiting run is sent again as a probe: another head may have ended the pause, and nothing says
so. For the same time, a replica that has refused one run counts as refusing all."""


class PausedRuns:
    """The refused runs of one stage. Lives on the orchestrator's loop.

    An engine that an operator has paused refuses requests until it resumes. Calls reach replicas at different times, so
    a run that one engine refuses goes to the others first. What all refuse goes back to the client, as with one engine,
    unless the fleet had accepted it before the pause: then it waits, as it would in an engine. Every `RETRY_S` one of
    the waiting runs is sent as a probe. If it is not refused within that time, all are sent.

    Args:
        wake_at: asks for calls of `take_ready` at this time, in monotonic seconds.
        has_upstream: whether the stage gets outputs of other stages, so that the fleet has accepted all its requests.

    Attributes:
        refused_by: ids of the replicas that have refused a run.
    """

    def __init__(
        self,
        pool: StagePool,
        suspects: Suspects,
        wake_at: Callable[[float], None],
        clock: Callable[[], float],
        has_upstream: bool,
    ) -> None:
        self._pool = pool
        self._suspects = suspects
        self._wake_at = wake_at
        self._clock = clock
        self._has_upstream = has_upstream
        self.refused_by: dict[StageRun, set[int]] = {}
        self._refused_at: dict[int, float] = {}
        self._ready: dict[StageRun, None] = {}
        self._waiting: dict[StageRun, None] = {}
        self._probe: StageRun | None = None
        self._probe_at = 0.0

    def __len__(self) -> int:
        """How many runs wait for the end of a pause."""
        return len(self._waiting)

    def add(self, run: StageRun, member: PoolMember) -> bool:
        """A replica has refused a run.

        Returns:
            Whether `take_ready` will return the run; otherwise its client gets the refusal.
        """
        now = self._clock()
        self._refused_at[member.replica_id] = now
        if run.streaming is not None and not run.streaming.replayable:
            # The chunks that the replica was sent are gone.
            return False
        refused_by = self.refused_by.setdefault(run, set())
        refused_by.add(member.replica_id)
        if run.affinity_key is None and any(self._may_accept(other, refused_by, now) for other in self._pool.serving):
            self._ready[run] = None
            self._wake_at(now)
        elif (run.losses or run.first_request is not None or self._has_upstream) and (
            len(self._waiting) < MAX_HELD_REQUESTS
        ):
            refused_by.clear()
            self._wait(run, now)
        else:
            return False
        self._suspects.remove(run)
        self._pool.release(run)
        run.unassign()
        return True

    def take_ready(self) -> StageRun | None:
        """Remove and return the next run to be sent. To be called until there is none."""
        run = next(iter(self._ready), None)
        if run is not None:
            del self._ready[run]
            return run
        if not self._waiting:
            return None
        now = self._clock()
        if now < self._probe_at:
            self._wake_at(self._probe_at)
            return None
        if self._probe is None:
            self._probe, self._probe_at = next(iter(self._waiting)), now + RETRY_S
            self._ready[self._probe] = None
            del self._waiting[self._probe]
        else:
            self._probe = None
            self._ready, self._waiting = self._waiting, {}
        return self.take_ready()

    def remove(self, run: StageRun) -> None:
        if self.refused_by.pop(run, None) is None:
            return
        self._ready.pop(run, None)
        self._waiting.pop(run, None)
        if run is self._probe:
            self._probe = None

    def _may_accept(self, member: PoolMember, refused_by: Collection[int], now: float) -> bool:
        refused_at = self._refused_at.get(member.replica_id)
        return member.replica_id not in refused_by and (refused_at is None or refused_at + RETRY_S <= now)

    def _wait(self, run: StageRun, now: float) -> None:
        if run is self._probe or not self._waiting:
            self._probe, self._probe_at = None, now + RETRY_S
            self._wake_at(self._probe_at)
        self._waiting[run] = None
