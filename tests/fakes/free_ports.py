"""Free TCP ports, for listeners that start later or never."""

import itertools
import secrets
import socket

_FIRST, _COUNT = 10_000, 10_000
"""Outside Linux's range of ephemeral ports, so no other process gets one before the test listens on it."""
# Random start, since several test processes use the range.
_drawn = itertools.count(secrets.randbelow(_COUNT))


def free_port() -> int:
    """A TCP port that is free now; each call returns another one."""
    while True:
        port = _FIRST + next(_drawn) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
