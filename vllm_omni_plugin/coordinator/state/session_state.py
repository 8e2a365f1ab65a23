"""One head as the coordinator knows it."""

from vllm_omni_plugin.coordinator.protocol.head_messages import Hello, PeerWork, ReplicaWork, Work

# As many replicas as a table may hold, and as many again that have just started anew.
MAX_WORK_ROWS = 8192


class Session:
    """One connection of a head, and what the head has in flight, which outlives the connection.

    Attributes:
        head_id: The head's.
        peer: By which the coordinator's socket knows its connection.
        number: See `Hello`.
        heard_at: Monotonic seconds of its last word.
        synced: Whether it was told everything so far; otherwise it is told nothing before a full resync.
        synced_at: Monotonic seconds of its last full resync.
    """

    def __init__(self, hello: Hello, peer: bytes, now: float) -> None:
        self.head_id = hello.head_id
        self.heard_at = now
        self.synced_at = float("-inf")
        self._work: dict[int, ReplicaWork] = {}
        self._changed: dict[int, ReplicaWork] = {}
        self._replaced = self._has_reported = False
        self.open(hello, peer)

    def open(self, hello: Hello, peer: bytes) -> None:
        """Go on with another connection. What the head has reported stands until it reports anew."""
        self.peer = peer
        self.number = hello.session
        self.synced = False

    def report(self, work: Work) -> None:
        """Take a report in. Rows of more than `MAX_WORK_ROWS` replicas are ignored."""
        if work.full:
            self._work.clear()
            self._changed.clear()
            self._replaced = self._has_reported = True
        for row in work.work:
            if row.engine in self._work or len(self._work) + len(self._changed) < MAX_WORK_ROWS:
                self._changed[row.engine] = row
                if row.requests:
                    self._work[row.engine] = row
                else:
                    self._work.pop(row.engine, None)

    @property
    def has_news(self) -> bool:
        """Whether there is something that `take_news` would return."""
        return self._replaced or bool(self._changed)

    def take_news(self) -> PeerWork:
        """Return what the head has reported since the last time, the last of each replica only."""
        news = self.all_work() if self._replaced else None
        news = news or PeerWork(self.head_id, False, list(self._changed.values()))
        self._changed.clear()
        self._replaced = False
        return news

    def all_work(self) -> PeerWork | None:
        """Return all that it has in flight; None if it has not said yet."""
        return PeerWork(self.head_id, True, list(self._work.values())) if self._has_reported else None
