"""Keeping the last descriptors of a process free.

Without one, libzmq tries to accept a connection that waits again and again, which takes a whole processor.
"""

import contextlib
import resource
import socket

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
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            # Closing it is for libzmq, whose it is.
            connection.detach()
