"""Connections of libzmq's by their descriptors: the last ones of a process stay free, and pending may not send much.

Without a descriptor, libzmq tries to accept a connection that waits again and again, which takes a whole processor.
How large a frame a peer may send is the same before and after it has been let in.
"""

import contextlib
import resource
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import zmq

RESERVED_DESCRIPTORS = 16
"""As many connections may come before the first of them is cut."""
NO_DESCRIPTORS_LEFT = "this process has no descriptor left for it: raise its limit of open files (ulimit -n)"
MAX_HANDSHAKE_BYTES = 4096
"""A client of ours sends some 600 bytes until it is let in."""
MAX_SENT_BEFORE_AUTH: dict[int, int] = {zmq.CURVE: 64 + 170 + 14, zmq.PLAIN: 64 + 10 + 14}
"""What a server sends at most before it lets somebody in, by what it demands: a greeting, WELCOME, ERROR. READY is
longer than ERROR."""
_RESET = struct.pack("ii", 1, 0)
# Of the kernel's tcp_info: how many bytes the peer has acknowledged, and how many have come from it.
_COUNTS = struct.Struct("=120x2Q")


def is_reserved(descriptor: int) -> bool:
    """Whether a descriptor is one of the last; the system always gives the lowest that is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - RESERVED_DESCRIPTORS


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


class PendingConnections:
    """Ends connections to sockets that demand a key or password, once they have sent too much and were not let in.

    Who was let in is seen by what it has acknowledged, which cannot be more than it was sent.
    """

    def __init__(self) -> None:
        self._expected: dict[int, tuple[int, int]] = {}
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """What is readable when `close_oversized` should be called."""
        return self._epoll.fileno()

    def add(self, descriptor: int, endpoint: str, max_sent_before_auth: int) -> None:
        """Watch a connection of libzmq's that was accepted at an endpoint, unless it is no tcp or is gone again."""
        with suppress(OSError, ValueError):
            expected = (int(endpoint.rpartition(":")[2]), max_sent_before_auth)
            self._expected[descriptor] = expected
            # It leaves the set when libzmq closes it. An arrival that libzmq has read is told only because there
            # is something else to tell: that the connection can be written to.
            events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
            try:
                self._epoll.register(descriptor, events)
            except FileExistsError:
                # Told late of a connection that had this descriptor before; this one is to be looked at once more.
                self._epoll.modify(descriptor, events)

    def close_oversized(self) -> list[int]:
        """Look at those that have sent something; return the descriptors of those that were ended."""
        return [descriptor for descriptor, _ in self._epoll.poll(0) if self._is_ended(descriptor)]

    def close(self) -> None:
        """Watch no more."""
        self._epoll.close()

    def _is_ended(self, descriptor: int) -> bool:
        with suppress(OSError, struct.error), borrowed(descriptor) as connection:
            # Older kernels tell less; there a frame's largest size is the only limit.
            acknowledged, received = _COUNTS.unpack(
                connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
            )
            port, max_sent_before_auth = self._expected[descriptor]
            # The descriptor may be that of another connection by now, which is none of ours.
            if acknowledged > max_sent_before_auth or connection.getsockname()[1] != port:
                self._epoll.unregister(descriptor)
            elif received > MAX_HANDSHAKE_BYTES:
                # First, since a shutdown is an event, too.
                self._epoll.unregister(descriptor)
                # Whoever goes on sending is to hear of it, too, when libzmq has noticed the end and closes it.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False
