"""Decides whether an engine that cannot start ends its node, or is tried again beside engines that can."""

from collections.abc import Hashable


class FirstStarts:
    """The first starts of the engines of one stage on one node.

    A node whose engines all fail has a wrong command line, or no GPU that works. Otherwise only the GPU of the failed
    engine is at fault, and the others serve.
    """

    def __init__(self, engines: int = 1) -> None:
        self._engines = engines
        self._failed: set[Hashable] = set()
        self._any_served = False

    def succeeded(self) -> None:
        self._any_served = True

    def failed(self, engine: Hashable) -> bool:
        """Whether no engine has served, and none is still in its first start."""
        self._failed.add(engine)
        return not self._any_served and len(self._failed) == self._engines
