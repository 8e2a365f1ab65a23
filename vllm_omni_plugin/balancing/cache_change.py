"""What changed in the prefix cache of one engine."""

from collections.abc import Sequence
from typing import NamedTuple


class CacheChange(NamedTuple):
    """Blocks are named by `block_keys`. Applied in order: `restart`, `removed`, `stored`.

    Attributes:
        stored: blocks that can be reused from here on.
        removed: blocks that no longer can.
        restart: all that was known before is void: the cache was cleared, or reports of it were lost.
        complete: whether what is known now is all there is; false from the loss of reports until they are caught up.
    """

    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    restart: bool = False
    complete: bool = True
