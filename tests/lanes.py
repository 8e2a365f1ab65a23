"""How tests are handed out to several lanes."""

from xdist.scheduler import LoadGroupScheduling


class Lanes(LoadGroupScheduling):
    """Tests of one file run one after the other in one lane, and so do those with the same mark `xdist_group`."""

    def _split_scope(self, nodeid: str) -> str:
        scope = str(super()._split_scope(nodeid))
        # Without a word every lane would start all servers otherwise, as with pytest 9.2 and xdist 3.8.
        assert "@" in nodeid or not scope.startswith("tests/engine/"), f"xdist knows no group of {nodeid}"
        return scope.partition("::")[0]
