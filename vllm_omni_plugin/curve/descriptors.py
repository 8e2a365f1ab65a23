"""Limits on libzmq's TCP connections, which are found by their descriptors.

The last descriptors of a process stay free: without one, libzmq busy-loops on a connection that it cannot accept.
Unauthenticated peers may send only a few bytes: libzmq's limit of a frame is the same before and after authentication.
"""

import resource
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq

RESERVED_DESCRIPTORS = 16
"""Number of connections that may come at once before one of them is cut."""
NO_DESCRIPTORS_LEFT = "this process has no descriptor left for it: raise its limit of open files (ulimit -n)"
MAX_HANDSHAKE_BYTES = 4096
"""Our clients send about 600 bytes until they are authenticated."""
MAX_SENT_BEFORE_AUTH: dict[int, int] = {zmq.CURVE: 64 + 170 + 14, zmq.PLAIN: 64 + 10 + 14}
"""Bytes that a server sends at most to an unauthenticated peer, by mechanism: greeting, WELCOME and ERROR. An
authenticated one gets READY, which is longer than ERROR."""
_RESET = struct.pack("ii", 1, 0)
# In the kernel's tcp_info: bytes that the peer has acknowledged, and bytes received from it.
_COUNTS = struct.Struct("=120x2Q")


def is_reserved(descriptor: int) -> bool:
    """Whether a descriptor is one of the last. The kernel always gives the lowest free one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - RESERVED_DESCRIPTORS


def cut_connection(descriptor: int) -> None:
    """Shut a connection of libzmq's down.

    If the descriptor belongs to another peer by now, that peer connects again.
    """
    with suppress(OSError), borrowed(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket object for a descriptor that libzmq owns and closes. Raises OSError if it is no socket."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


class PendingConnections:
    """Ends unauthenticated connections that have sent more than `MAX_HANDSHAKE_BYTES`.

    A peer is authenticated if it has acknowledged more bytes than an unauthenticated one is sent.
    """

    def __init__(self) -> None:
        self._expected: dict[int, tuple[int, int]] = {}
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `close_oversized` should be called."""
        return self._epoll.fileno()

    def add(self, descriptor: int, endpoint: str, max_sent_before_auth: int) -> None:
        """Watch a connection accepted at an endpoint. Ignored if it is not tcp or already closed."""
        with suppress(OSError, ValueError):
            expected = (int(endpoint.rpartition(":")[2]), max_sent_before_auth)
            self._expected[descriptor] = expected
            # The kernel removes it when libzmq closes it. EPOLLOUT, because data that libzmq has already read raises no
            # EPOLLIN event.
            events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
            try:
                self._epoll.register(descriptor, events)
            except FileExistsError:
                # The descriptor was reused. `modify` raises a new event for the new connection.
                self._epoll.modify(descriptor, events)

    def close_oversized(self) -> list[int]:
        """Check connections that have received data; return the descriptors of those that were ended."""
        return [descriptor for descriptor, _ in self._epoll.poll(0) if self._is_ended(descriptor)]

    def close(self) -> None:
        self._epoll.close()

    def _is_ended(self, descriptor: int) -> bool:
        with suppress(OSError, struct.error), borrowed(descriptor) as connection:
            # Older kernels return less; there the maximum size of a frame is the only limit.
            acknowledged, received = _COUNTS.unpack(
                connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
            )
            port, max_sent_before_auth = self._expected[descriptor]
            # The descriptor may belong to a connection of another socket by now.
            if acknowledged > max_sent_before_auth or connection.getsockname()[1] != port:
                self._epoll.unregister(descriptor)
            elif received > MAX_HANDSHAKE_BYTES:
                # Before the shutdown, which is an event, too.
                self._epoll.unregister(descriptor)
                # The peer gets a reset when libzmq closes the connection.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False
