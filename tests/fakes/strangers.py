"""A peer that has not authenticated, on a plain tcp connection to a port that speaks ZMTP."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

# Signature, version 3.1, mechanism, "I am the client", filler (RFC 37).
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01%b" + bytes(32)
_LONG_COMMAND = b"\x06"
_PATIENCE_S = 20.0


class Stranger:
    """It has sent its greeting."""

    def __init__(self, connection: socket.socket, mechanism: bytes) -> None:
        self._connection = connection
        connection.sendall(_GREETING % mechanism.ljust(20, b"\0"))

    def announce(self, size: int) -> None:
        """Begin a frame of so many bytes."""
        self.send(_LONG_COMMAND + struct.pack(">Q", size))

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def is_cut(self) -> bool:
        """Whether the other end ends the connection, which this waits for."""
        try:
            while self._connection.recv(65536):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True


@contextmanager
def stranger(port: int, mechanism: bytes = b"CURVE") -> Iterator[Stranger]:
    with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as connection:
        yield Stranger(connection, mechanism)
