"""How long to wait before a replica that died is started again."""

_FIRST_S = 1.0
_LONGEST_S = 60.0
_HEALTHY_AFTER_S = 60.0


class RestartBackoff:
    """Doubles from one second to a minute, and starts over once a replica has lived for a minute.

    The first restart comes quickly, since a single death is most often an accident; a replica that keeps dying must not
    take the node's cores and disk from those that serve.
    """

    def __init__(self) -> None:
        self._next = _FIRST_S

    def after(self, lived: float) -> float:
        """Seconds to wait after a replica that served for `lived` seconds (0.0 if it never came up)."""
        if lived >= _HEALTHY_AFTER_S:
            self._next = _FIRST_S
        delay = self._next
        self._next = min(self._next * 2, _LONGEST_S)
        return delay
