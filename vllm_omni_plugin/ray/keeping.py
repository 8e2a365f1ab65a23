"""The loop that keeps as many nodes as are wanted, until it is told to end."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.ray.node_set import Do, NodeSet
from vllm_omni_plugin.ray.ray_nodes import News, RayNodes

TICK_S = 2.0
"""Between two looks at what is wanted, and at signals."""
_REFUSED = 2
"""Exit code of `vllm serve` for a command line that it does not take. Where no node has taken it yet, none will;
later it is the fault of one machine, such as a file that is missing there."""


@dataclass
class Keeping:
    """Keeps nodes at the wanted number.

    Attributes:
        nodes: what they run on.
        node_set: decides which to start and to end.
        wanted: says how many there should be at a time.
        clock: time in seconds.
        say: writes a line for the operator.
        signals: how often it was told to end, or had to. The first time all nodes drain, then what they have moves.
    """

    nodes: RayNodes
    node_set: NodeSet
    wanted: Callable[[float], int]
    clock: Callable[[], float]
    say: Callable[[str], None]
    signals: int = 0
    _heard: int = field(default=0, init=False)
    _refused: bool = field(default=False, init=False)

    def run(self) -> bool:
        """Return when all nodes have ended: True after a signal, False if a node's command line was refused.

        Raises:
            OmniError: the nodes are lost with Ray.
            Exception: what nobody foresaw, after the nodes have drained.
        """
        try:
            return self._keep()
        except OmniError:
            raise
        except Exception as error:
            self.signals = max(1, self.signals)
            self.say(f"all nodes end, because of {type(error).__name__}: {error}")
            self._keep()
            raise

    def _keep(self) -> bool:
        actions = {Do.START: self.nodes.start, Do.DRAIN: self.nodes.drain, Do.KILL: self.nodes.kill}
        while True:
            ending, now = self.signals > 0, self.clock()
            for do, number in self.node_set.decide(now, 0 if ending else self.wanted(now)):
                actions[do](number)
                self.say(f"node {number}: {do.value}")
            if self.signals > max(1, self._heard):
                for number in self.node_set.draining():
                    self.nodes.drain(number)
            self._heard = self.signals
            if ending and not self.node_set:
                return not self._refused
            for news in self.nodes.news(TICK_S):
                self._note(news)

    def _note(self, news: News) -> None:
        now, number, how = self.clock(), news.number, news.how
        if news.host is not None:
            self.node_set.placed(now, number)
            self.say(f"node {number}: runs on {news.host}")
            return
        settled = self.node_set.ended(now, number)
        self.say(f"node {number}: " + (f"lost, {how}" if isinstance(how, str) else f"ended with code {how}"))
        if how == _REFUSED and not settled and not self.signals:
            self._refused, self.signals = True, 1
            self.say("the command line of nodes is refused, see the node's own lines above; all nodes end")
