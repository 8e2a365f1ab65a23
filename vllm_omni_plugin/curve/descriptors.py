"""Keeps the last descriptors of a process free.

Without one, libzmq busy-loops on a connection that it cannot accept.
"""

import resource
import socket
from contextlib import suppress

RESERVED_DESCRIPTORS = 16
"""Number of connections that may come at once before one of them is cut."""
NO_DESCRIPTORS_LEFT = "this process has no descriptor left for it: raise its limit of open files (ulimit -n)"


def is_reserved(descriptor: int) -> bool:
    """Whether a descriptor is one of the last. The kernel always gives the lowest free one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - RESERVED_DESCRIPTORS


def cut_connection(descriptor: int) -> None:
    """Shut a connection of libzmq's down. If another peer has the descriptor by now, that peer connects again."""
    with suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            # libzmq owns and closes it.
            connection.detach()
