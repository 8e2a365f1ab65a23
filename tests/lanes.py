"""How tests are handed out to several lanes."""

from xdist.scheduler import LoadGroupScheduling


class Lanes(LoadGroupScheduling):
    """Tests of one file run one after the other in one lane, and so do those with the same mark `xdist_group`."""

    def _split_scope(self, nodeid: str) -> str:
        return str(super()._split_scope(nodeid)).partition("::")[0]
