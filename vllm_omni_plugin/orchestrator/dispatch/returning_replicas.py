"""Replicas that come back one after the other, after a time in which none served."""

from collections.abc import Callable

from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool

RETURN_INTERVAL_S = 1.0
"""Seconds for which the next replica is awaited after each return."""


class ReturningReplicas:
    """Leaves to the replicas that are still to come back what those that are back cannot start at once.

    Otherwise the first replica would get all that has waited. What is left waits for `RETURN_INTERVAL_S` after the last
    return at most. It loses nothing by that: in an engine it would wait, too.

    Args:
        wake_at: asks for a call of `tick` at this time, in monotonic seconds.

    Attributes:
        awaited: whether more replicas are awaited.
    """

    def __init__(self, pool: StagePool, wake_at: Callable[[float], None], clock: Callable[[], float]) -> None:
        self._pool = pool
        self._wake_at = wake_at
        self._clock = clock
        self._until = 0.0
        self.awaited = False

    @property
    def may_assign(self) -> bool:
        """Whether a held run may be assigned now: a replica can start it, or no further replica is awaited."""
        return not self.awaited or any(member.ledger.can_start for member in self._pool.serving)

    @property
    def full(self) -> set[int]:
        """Ids of the replicas that can start nothing more."""
        return {member.replica_id for member in self._pool.serving if not member.ledger.can_start}

    def returned(self, requests_wait: bool) -> None:
        """A replica serves again; `requests_wait`: some wait since none served."""
        if self.awaited or (requests_wait and len(self._pool.serving) == 1):
            self.awaited = True
            self._until = self._clock() + RETURN_INTERVAL_S
            self._wake_at(self._until)

    def tick(self) -> None:
        """Time has passed."""
        if self.awaited and self._clock() < self._until:
            self._wake_at(self._until)
        else:
            self.awaited = False
