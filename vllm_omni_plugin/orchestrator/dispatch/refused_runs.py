"""Requests that paused engines refuse: each goes elsewhere, back to its client, or waits for the pause to end."""

from collections.abc import Callable, Collection

from vllm_omni_plugin.orchestrator.dispatch.held_requests import HeldRequests
from vllm_omni_plugin.orchestrator.dispatch.suspects import Suspects
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

RETRY_S = 0.5
"""Seconds after which a request that all replicas have refused is sent again: nothing tells when a pause ends, which
another head may do."""


class RefusedRuns:
    """The refused requests of one stage. Lives on the orchestrator's loop.

    An engine that an operator has paused refuses requests until it resumes. Calls reach replicas at different times, so
    one refusal does not mean that all would. What all refuse is the client's to send again, as with one engine; but not
    what the fleet had taken before the pause: that waits, as it would in an engine.

    Args:
        pool: the stage's replicas.
        suspects: of the stage; one that was refused is tried nowhere.
        wake_at: asks for calls of `take` at this time, in monotonic seconds.
        clock: monotonic seconds.
        taken_before: whether the stage's requests come from other stages, so that the fleet has taken them.
    """

    def __init__(
        self,
        pool: StagePool,
        suspects: Suspects,
        wake_at: Callable[[float], None],
        clock: Callable[[], float],
        taken_before: bool,
    ) -> None:
        self._pool = pool
        self._suspects = suspects
        self._wake_at = wake_at
        self._clock = clock
        self._taken_before = taken_before
        self._refused_by: dict[StageRun, set[int]] = {}
        self._next: dict[StageRun, None] = {}
        self._waiting = HeldRequests(RETRY_S, wake_at)

    def refuse(self, run: StageRun, member: PoolMember) -> bool:
        """A replica has refused a request.

        Returns:
            Whether it goes on, and `take` will give it; otherwise its client is to be told.
        """
        if run.streaming is not None and not run.streaming.replayable:
            # What of a session the replica has been sent is gone.
            return False
        refused_by = self._refused_by.setdefault(run, set())
        refused_by.add(member.replica_id)
        others = any(other.replica_id not in refused_by for other in self._pool.serving)
        if others and run.affinity_key is None:
            self._next[run] = None
            # Not at once: where it is sent may turn out to be dead, with the rest of what is dealt with here.
            self._wake_at(self._clock())
        elif (run.losses or self._taken_before) and self._waiting.hold(run, self._clock()):
            refused_by.clear()
        else:
            return False
        self._suspects.forget(run)
        self._pool.release(run)
        run.refuse()
        return True

    def avoided(self, run: StageRun) -> Collection[int]:
        """Ids of the replicas that have refused a request and are not asked again while others serve."""
        return self._refused_by.get(run, ())

    def take(self) -> StageRun | None:
        """The next one to be sent, which waits no more. To be asked until there is none."""
        run = next(iter(self._next), None)
        if run is None:
            return self._waiting.take_overdue(self._clock())
        del self._next[run]
        return run

    def forget(self, run: StageRun) -> None:
        """A request has ended."""
        if self._refused_by.pop(run, None) is not None:
            self._next.pop(run, None)
            self._waiting.remove(run)
