"""How many topics each connected peer has subscribed to."""


class TopicCounts:
    """Counts per connection. A descriptor is used again for the next one, so each count belongs to an admission, too.

    Memory is bounded by the descriptors that connections had.
    """

    def __init__(self) -> None:
        self._counts: dict[int, tuple[str, int]] = {}

    def add(self, descriptor: int, admission: str) -> int:
        """Count a topic; return how many this connection has now.

        Args:
            descriptor: The connection's.
            admission: What the gate called it, new for every connection.
        """
        known, count = self._counts.get(descriptor, (admission, 0))
        count = count + 1 if known == admission else 1
        self._counts[descriptor] = (admission, count)
        return count
