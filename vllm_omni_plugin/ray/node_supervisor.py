"""Keeps the wanted number of nodes running until a signal ends the command."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import NamedTuple

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.ray.ray_nodes import NodeEvent, RayNodes

GRACE_S = 30.0
"""Time beyond its drain timeout after which a node is killed, the same as in all deployments."""
PAUSE_S = 10.0
"""Pause before the next start if a node ended by itself within `_SETTLED_S`: the cause may last."""
TICK_S = 2.0
"""Interval of checking the wanted number and signals."""
_SETTLED_S = 60.0
_REFUSED = 2
"""Exit code of `vllm serve` for a command line that it refuses. If no node has settled yet, none will accept it. Later
the cause is one machine, such as a file that is missing there."""


class NodeAction(Enum):
    """What to do to a node. `DRAIN` is SIGTERM: the node takes no new requests and finishes those it has."""

    START = "start"
    DRAIN = "drain"
    KILL = "kill"


@dataclass
class _Node:
    """A requested node that has not ended; `since` is the time of the request, later of the placement on a machine."""

    since: float
    placed: bool = False
    drained_at: float | None = None


class NodeSet:
    """The nodes by number, in the order of their starts. Numbers are never reused. Times are in seconds.

    `numbers` are shared by the sets of one supervisor.
    """

    def __init__(self, drain_timeout: float, numbers: Iterator[int] | None = None) -> None:
        self._kill_after = drain_timeout + GRACE_S
        self._nodes: dict[int, _Node] = {}
        self._numbers = count() if numbers is None else numbers
        self._start_at = float("-inf")
        self._settled = False

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, number: int) -> bool:
        return number in self._nodes

    def draining(self) -> list[int]:
        return [number for number, node in self._nodes.items() if node.drained_at is not None and node.placed]

    def decide(self, now: float, wanted: int) -> list[tuple[NodeAction, int]]:
        """Return the actions that lead to `wanted` nodes.

        Nodes without a machine are removed first, then the newest, since they have the least in their caches.
        """
        actions = [
            (NodeAction.KILL, number)
            for number, node in self._nodes.items()
            if node.drained_at is not None and now - node.drained_at > self._kill_after
        ]
        kept = [number for number, node in self._nodes.items() if node.drained_at is None]
        kept.sort(key=lambda number: not self._nodes[number].placed)
        for number in reversed(kept[wanted:]):
            node = self._nodes[number]
            node.drained_at = now
            # A node without a machine has no process to signal.
            actions.append((NodeAction.DRAIN if node.placed else NodeAction.KILL, number))
        missing = wanted - len(kept) if now >= self._start_at else 0
        for _ in range(missing):
            number = next(self._numbers)
            self._nodes[number] = _Node(now)
            actions.append((NodeAction.START, number))
        return actions

    def placed(self, now: float, number: int) -> None:
        node = self._nodes[number]
        node.since, node.placed = now, True

    def ended(self, now: float, number: int) -> bool:
        """Note that a node has ended. Returns whether any node has run for a minute so far."""
        self._settled |= any(node.placed and now - node.since >= _SETTLED_S for node in self._nodes.values())
        node = self._nodes.pop(number)
        if node.drained_at is None and now - node.since < _SETTLED_S:
            self._start_at = now + PAUSE_S
        return self._settled


class NodeGroup(NamedTuple):
    """Nodes of one kind: those of a stage. `wanted` returns their wanted number at a time; `name` follows a number."""

    node_set: NodeSet
    wanted: Callable[[float], int]
    name: str = ""


@dataclass
class NodeSupervisor:
    """Runs the actions of `NodeSet`s on Ray; `groups` are in the order of the kinds of `nodes`.

    `signals` counts signals so far: the first one drains all nodes, and a second one is passed on to them.
    """

    nodes: RayNodes
    groups: Sequence[NodeGroup]
    clock: Callable[[], float]
    report: Callable[[str], None]
    signals: int = 0
    _handled: int = field(default=0, init=False)
    _refused: bool = field(default=False, init=False)

    def run(self) -> bool:
        """Return when all nodes have ended: True after a signal, False if a node's command line was refused.

        Raises OmniError if Ray has ended with all nodes; any other error after all nodes have drained.
        """
        try:
            return self._run()
        except OmniError:
            raise
        except Exception as error:
            self.signals = max(1, self.signals)
            self.report(f"all nodes end, because of {type(error).__name__}: {error}")
            self._run()
            raise

    def _run(self) -> bool:
        """Start, drain and kill nodes until all have ended after a signal; False if their command line was refused."""
        methods = {NodeAction.DRAIN: self.nodes.drain, NodeAction.KILL: self.nodes.kill}
        while True:
            ending, now = self.signals > 0, self.clock()
            for kind, (node_set, wanted, name) in enumerate(self.groups):
                for action, number in node_set.decide(now, 0 if ending else wanted(now)):
                    if action is NodeAction.START:
                        self.nodes.start(number, kind)
                    else:
                        methods[action](number)
                    self.report(f"node {number}{name}: {action.value}")
                if self.signals > max(1, self._handled):
                    for number in node_set.draining():
                        self.nodes.drain(number)
            self._handled = self.signals
            if ending and not any(group.node_set for group in self.groups):
                return not self._refused
            for event in self.nodes.events(TICK_S):
                self._node_changed(event)

    def _node_changed(self, event: NodeEvent) -> None:
        """Note where a node runs or how it ended; exit code 2 before any has run for a minute ends them all."""
        now, number, end = self.clock(), event.number, event.end
        node_set, _, name = next(group for group in self.groups if number in group.node_set)
        if event.host is not None:
            node_set.placed(now, number)
            self.report(f"node {number}{name}: runs on {event.host}")
            return
        settled = node_set.ended(now, number)
        self.report(f"node {number}{name}: " + (f"lost, {end}" if isinstance(end, str) else f"ended with code {end}"))
        if end == _REFUSED and not settled and not self.signals:
            self._refused, self.signals = True, 1
            self.report("the command line of nodes is refused, see the node's own lines above; all nodes end")
