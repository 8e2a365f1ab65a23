"""One head as the coordinator knows it."""

from vllm_omni_plugin.coordinator.deliveries import PeerWork
from vllm_omni_plugin.coordinator.head_messages import ReplicaWork, Work

# As many replicas as a table may hold, and as many again that have just started anew.
MAX_WORK_ROWS = 8192


class Seat:
    """What a head has said, and how far it was told what others said.

    Attributes:
        head_id: The head's.
        peer: By which the coordinator's socket knows its connection.
        number: Of the seat, see `Beat`.
        heard_at: Monotonic seconds of its last beat.
        told_at: Monotonic seconds at which it was last told everything.
        sequence: Number of the last delivery.
        work_sequence: Number of the last `Work` that was received.
        in_step: Whether nothing is missing of what it has in flight.
        has_reported: Whether anything is known of that.
    """

    def __init__(self, head_id: str, peer: bytes, number: int, now: float) -> None:
        self.head_id = head_id
        self.peer = peer
        self.number = number
        self.heard_at = now
        self.told_at = float("-inf")
        self.sequence = 0
        self.work_sequence = 0
        self.in_step = False
        self.has_reported = False
        # By engine.
        self._work: dict[int, ReplicaWork] = {}
        self._changed: dict[int, ReplicaWork] = {}
        self._replaced = False

    def move(self, peer: bytes, number: int) -> None:
        """Go on with another connection. What it said stands until it reports anew."""
        self.peer = peer
        self.number = number
        self.told_at = float("-inf")
        self.in_step = False

    def report(self, work: Work) -> bool:
        """Take a report in; return whether nothing is missing. If so, only a full one counts."""
        follows = self.in_step and work.sequence == self.work_sequence + 1
        self.work_sequence = work.sequence
        self.in_step = work.full or follows
        if work.full:
            self._work.clear()
            self._changed.clear()
            self._replaced = self.has_reported = True
        if len(self._work) + len(self._changed) + len(work.work) > MAX_WORK_ROWS:
            self.in_step = False
        if self.in_step:
            self._take(work.work)
        return self.in_step

    @property
    def has_news(self) -> bool:
        """Whether there is something that `take_news` would return."""
        return self._replaced or bool(self._changed)

    def take_news(self) -> PeerWork:
        """Return what the head has reported since the last time, the last of each replica only."""
        news = self.all_work() if self._replaced else PeerWork(self.head_id, False, list(self._changed.values()))
        self._changed.clear()
        self._replaced = False
        return news

    def all_work(self) -> PeerWork:
        """Return all that it has in flight, as far as it has said."""
        return PeerWork(self.head_id, True, list(self._work.values()))

    def _take(self, work: list[ReplicaWork]) -> None:
        for row in work:
            self._changed[row.engine] = row
            if row.requests:
                self._work[row.engine] = row
            else:
                self._work.pop(row.engine, None)
