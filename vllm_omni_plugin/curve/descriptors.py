"""Connections of libzmq's by their descriptors, and keeping the last descriptors of a process free.

Without one, libzmq tries to accept a connection that waits again and again, which takes a whole processor.
"""

import contextlib
import resource
import socket
from collections.abc import Iterator

SPARE_DESCRIPTORS = 16
"""As many connections may come before the first of them is cut."""

NONE_LEFT = "this process has no descriptor left for it: raise its limit of open files (ulimit -n)"


def is_spare(descriptor: int) -> bool:
    """Whether a descriptor is one of the last; the system always gives the lowest that is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - SPARE_DESCRIPTORS


def cut_connection(descriptor: int) -> None:
    """End a connection of libzmq's, which then forgets its peer.

    Should the peer have gone and another one have got its descriptor meanwhile, that one connects again.
    """
    with contextlib.suppress(OSError), borrowed(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A connection of libzmq's, which closes it itself. Raises OSError if the descriptor is no socket (any more)."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
