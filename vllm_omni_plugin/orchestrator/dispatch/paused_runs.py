"""Requests that paused engines refuse: each goes elsewhere, back to its client, or waits for the pause to end."""

from collections.abc import Callable, Collection

from vllm_omni_plugin.orchestrator.dispatch.hold_queue import MAX_HELD_REQUESTS
from vllm_omni_plugin.orchestrator.dispatch.suspects import Suspects
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

RETRY_S = 0.5
"""Seconds after which one of the requests that all replicas have refused is sent again: nothing tells when a pause
ends, which another head may do. So long a replica that has refused one request counts as refusing all."""


class PausedRuns:
    """The refused requests of one stage. Lives on the orchestrator's loop.

    An engine that an operator has paused refuses requests until it resumes. Calls reach replicas at different times, so
    one refusal does not mean that all would. What all refuse is the client's to send again, as with one engine; but not
    what the fleet had taken before the pause: that waits, as it would in an engine. One of those that wait is sent
    every `RETRY_S`, and if it is not refused within that time, all are.

    Args:
        pool: the stage's replicas.
        suspects: of the stage; one that was refused is tried nowhere.
        wake_at: asks for calls of `take` at this time, in monotonic seconds.
        clock: monotonic seconds.
        fed: whether requests get here what other stages have put out, so that the fleet has taken all of them.
    """

    def __init__(
        self,
        pool: StagePool,
        suspects: Suspects,
        wake_at: Callable[[float], None],
        clock: Callable[[], float],
        fed: bool,
    ) -> None:
        self._pool = pool
        self._suspects = suspects
        self._wake_at = wake_at
        self._clock = clock
        self._fed = fed
        self._refused_by: dict[StageRun, set[int]] = {}
        self._refused_at: dict[int, float] = {}
        self._next: dict[StageRun, None] = {}
        self._waiting: dict[StageRun, None] = {}
        self._probe: StageRun | None = None
        self._probe_at = 0.0

    def __len__(self) -> int:
        """How many wait for the end of a pause."""
        return len(self._waiting)

    def refuse(self, run: StageRun, member: PoolMember) -> bool:
        """A replica has refused a request.

        Returns:
            Whether it goes on, and `take` will give it; otherwise its client is to be told.
        """
        now = self._clock()
        self._refused_at[member.replica_id] = now
        if run.streaming is not None and not run.streaming.replayable:
            # What of a session the replica has been sent is gone.
            return False
        refused_by = self._refused_by.setdefault(run, set())
        refused_by.add(member.replica_id)
        if run.affinity_key is None and any(self._may_take(other, refused_by, now) for other in self._pool.serving):
            self._next[run] = None
            # Not at once: where it is sent may turn out to be dead, with the rest of what is dealt with here.
            self._wake_at(now)
        elif (run.losses or run.first_request is not None or self._fed) and len(self._waiting) < MAX_HELD_REQUESTS:
            refused_by.clear()
            self._wait(run, now)
        else:
            return False
        self._suspects.forget(run)
        self._pool.release(run)
        run.undo_dispatch()
        return True

    def avoided(self, run: StageRun) -> Collection[int]:
        """Ids of replicas that a request does not go to if others serve: those of `Suspects`, and that refused it.

        Raises:
            NoReplicaError: see `Suspects.avoided`.
        """
        # What is bound to a replica finds what it needs nowhere else.
        apart = run.crash_losses or (run.affinity_key is None and self._suspects.tries)
        refused = self._refused_by.get(run, ())
        return self._suspects.avoided(run, refused) if apart else refused

    def avoids(self, run: StageRun, member: PoolMember) -> bool:
        """Whether a request does not go to a replica, since others serve."""
        avoided = self.avoided(run)
        return member.replica_id in avoided and any(other.replica_id not in avoided for other in self._pool.serving)

    def take(self) -> StageRun | None:
        """The next one to be sent, which waits no more. To be asked until there is none."""
        run = next(iter(self._next), None)
        if run is not None:
            del self._next[run]
            return run
        if not self._waiting:
            return None
        now = self._clock()
        if now < self._probe_at:
            self._wake_at(self._probe_at)
            return None
        if self._probe is None:
            self._probe, self._probe_at = next(iter(self._waiting)), now + RETRY_S
            self._next[self._probe] = None
            del self._waiting[self._probe]
        else:
            self._probe = None
            self._next, self._waiting = self._waiting, {}
        return self.take()

    def forget(self, run: StageRun) -> None:
        """A request has ended."""
        if self._refused_by.pop(run, None) is None:
            return
        self._next.pop(run, None)
        self._waiting.pop(run, None)
        if run is self._probe:
            self._probe = None

    def _may_take(self, member: PoolMember, refused_by: Collection[int], now: float) -> bool:
        refused_at = self._refused_at.get(member.replica_id)
        return member.replica_id not in refused_by and (refused_at is None or refused_at + RETRY_S <= now)

    def _wait(self, run: StageRun, now: float) -> None:
        if run is self._probe or not self._waiting:
            self._probe, self._probe_at = None, now + RETRY_S
            self._wake_at(self._probe_at)
        self._waiting[run] = None
