"""Which engines of a stage have refused requests lately, because they are paused; and when one is tried again."""

from math import inf

RETRY_S = 0.5
"""Seconds after which an engine that has refused a request may get one again: another head may have ended the pause,
and nothing says so."""


class EngineRefusals:
    """While runs wait for the end of a pause, one of them is tried every `RETRY_S`. All others go when an engine has
    begun to answer one, or when none was refused for as long. `tried`: one was sent, and none was refused since.
    """

    def __init__(self) -> None:
        self.tried = False
        self.next_try_at = inf
        self._refused_at: dict[int, float] = {}

    def refused(self, replica_id: int, now: float) -> None:
        """A replica has refused a request."""
        self._refused_at[replica_id] = now
        if self.tried:
            self.tried, self.next_try_at = False, now + RETRY_S

    def first_waits(self, now: float) -> None:
        """A run waits for the end of the pause, the first one."""
        self.tried, self.next_try_at = False, now + RETRY_S

    def tries(self, now: float, others_wait: bool) -> None:
        """A waiting run is sent."""
        if not self.tried:
            self.next_try_at = now + RETRY_S
        self.tried = others_wait

    def accepted(self, now: float) -> None:
        """An engine has begun to answer a run, after one was tried: the others may go."""
        self.next_try_at = now

    def refusing(self, now: float) -> set[int]:
        """Ids of the replicas that have refused a request lately."""
        return {replica_id for replica_id, at in self._refused_at.items() if now < at + RETRY_S}
