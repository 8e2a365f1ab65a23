"""When the replica list goes out: soon after a change, never too often, never too rarely."""

MIN_INTERVAL = 0.1
KEEP_ALIVE_INTERVAL = 5.0


class PublishSchedule:
    """Coalesces requests to publish: at most one per interval, at least one per 5 s. Times are monotonic seconds."""

    def __init__(self, now: float, quiet_until: float, min_interval: float = MIN_INTERVAL) -> None:
        """Start at ``now``, holding everything back until ``quiet_until``."""
        self._min_interval = min_interval
        self._allowed_at = quiet_until
        self._keep_alive_at = max(quiet_until, now + KEEP_ALIVE_INTERVAL)
        self._requested = quiet_until > now

    @property
    def due_at(self) -> float:
        """When the next list must go out."""
        return self._allowed_at if self._requested else self._keep_alive_at

    def request(self, now: float) -> bool:
        """Ask for a list; return whether it may go out now (True) or joins a later one (False)."""
        self._requested = True
        return now >= self._allowed_at

    def published(self, now: float) -> None:
        """Note that a list went out."""
        self._requested = False
        self._allowed_at = now + self._min_interval
        self._keep_alive_at = now + KEEP_ALIVE_INTERVAL
