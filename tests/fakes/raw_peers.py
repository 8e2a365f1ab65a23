"""An unauthenticated peer: a plain tcp connection to a ZMTP port."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

# Signature, version 3.1, mechanism, "I am the client", filler (RFC 37).
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_LONG_COMMAND = b"\x06"
_PATIENCE_S = 20.0


class RawPeer:
    """Has sent its greeting."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.sendall(_GREETING)

    def send_frame_header(self, size: int) -> None:
        """Send the header of a frame of this size."""
        self._connection.sendall(_LONG_COMMAND + struct.pack(">Q", size))

    def is_disconnected(self) -> bool:
        """Wait until the other end closes the connection; return False after a timeout."""
        try:
            while self._connection.recv(65536):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True


@contextmanager
def raw_peer(port: int) -> Iterator[RawPeer]:
    with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as connection:
        yield RawPeer(connection)
