"""How tests are handed out to several lanes."""

from collections.abc import Mapping

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

_ON_ENGINES = 2
"""Lanes that start servers with engines: more would need more memory than a small machine has."""


class Lanes(LoadGroupScheduling):
    """Tests of one file run one after the other in one lane, and so do those with the same mark `xdist_group`.

    Lanes after the second take tests without engines only, and so fill the time in which servers start or wait.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.nodes.index(node) >= _ON_ENGINES:
            scope = next((scope for scope, tests in self.workqueue.items() if not _need_engines(tests)), None)
            if scope is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        scope = str(super()._split_scope(nodeid))
        # Without a word every lane would start all servers otherwise, as with pytest 9.2 and xdist 3.8.
        assert "@" in nodeid or not _need_engines({nodeid: False}), f"xdist knows no group of {nodeid}"
        return scope.partition("::")[0]


def _need_engines(tests: Mapping[str, bool]) -> bool:
    return next(iter(tests)).startswith("tests/engine/")
