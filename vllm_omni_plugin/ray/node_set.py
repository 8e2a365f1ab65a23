"""Which nodes to start, to drain and to kill so that as many run as are wanted."""

from dataclasses import dataclass
from enum import Enum

GRACE_S = 30.0
"""What a node has beyond its drain timeout before it is killed, as everywhere where nodes are deployed."""
_SETTLED_S = 60.0
PAUSE_S = 10.0
"""Before the next start, after a node that ended by itself within a minute: what it fails of may last."""


class Do(Enum):
    """What to do to a node. Draining is SIGTERM: the node takes nothing new and finishes what it has."""

    START = "start"
    DRAIN = "drain"
    KILL = "kill"


@dataclass
class _Node:
    """One that was asked for and has not ended.

    Attributes:
        since: when it was asked for, or else placed.
        placed: whether it runs on a machine.
        told_at: when it was told to end.
    """

    since: float
    placed: bool = False
    told_at: float | None = None


class NodeSet:
    """The nodes by number, in the order in which they were started. Numbers are never used again.

    Args:
        drain_timeout: seconds that a node may take to finish its requests.
    """

    def __init__(self, drain_timeout: float) -> None:
        self._patience = drain_timeout + GRACE_S
        self._nodes: dict[int, _Node] = {}
        self._next = 0
        self._start_at = float("-inf")
        self._settled = False

    def __len__(self) -> int:
        return len(self._nodes)

    def draining(self) -> list[int]:
        """The nodes that were told to end, and still run."""
        return [number for number, node in self._nodes.items() if node.told_at is not None and node.placed]

    def decide(self, now: float, wanted: int) -> list[tuple[Do, int]]:
        """What is to be done now. Those without room go first, then the newest: they have the least in their caches.

        Args:
            now: time in seconds.
            wanted: how many nodes should run.
        """
        actions = [
            (Do.KILL, number)
            for number, node in self._nodes.items()
            if node.told_at is not None and now - node.told_at > self._patience
        ]
        kept = [number for number, node in self._nodes.items() if node.told_at is None]
        kept.sort(key=lambda number: not self._nodes[number].placed)
        for number in reversed(kept[wanted:]):
            node = self._nodes[number]
            node.told_at = now
            # One that Ray has no room for yet cannot be told anything.
            actions.append((Do.DRAIN if node.placed else Do.KILL, number))
        missing = wanted - len(kept) if now >= self._start_at else 0
        for _ in range(missing):
            self._nodes[self._next] = _Node(now)
            actions.append((Do.START, self._next))
            self._next += 1
        return actions

    def placed(self, now: float, number: int) -> None:
        """Note that a node runs on a machine."""
        node = self._nodes[number]
        node.since, node.placed = now, True

    def ended(self, now: float, number: int) -> bool:
        """Note that a node is gone, whatever the reason; returns whether any node has run for a minute so far."""
        self._settled |= any(node.placed and now - node.since >= _SETTLED_S for node in self._nodes.values())
        node = self._nodes.pop(number)
        if node.told_at is None and now - node.since < _SETTLED_S:
            self._start_at = now + PAUSE_S
        return self._settled
