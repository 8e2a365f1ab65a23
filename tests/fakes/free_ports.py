"""TCP ports that nobody uses yet, for what is to listen later or never."""

import itertools
import secrets
import socket

_FIRST, _COUNT = 10_000, 10_000
"""Linux gives none of these to who takes any free port, so nobody else takes one before it is listened on."""
# Begun anywhere, since several lanes of tests draw from them.
_drawn = itertools.count(secrets.randbelow(_COUNT))


def free_port() -> int:
    """A TCP port that is free now, another one at each call."""
    while True:
        port = _FIRST + next(_drawn) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
