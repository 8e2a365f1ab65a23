"""What a node says on its ports while the head tries whether it reaches them."""

import select
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import Wakeup


@contextmanager
def answer_with_nonce(listening: Collection[socket.socket], nonce: bytes) -> Iterator[None]:
    """Meanwhile send the nonce on each connection to these sockets, in a thread, and end the connection."""
    is_over = Wakeup()
    thread = threading.Thread(target=_answer, args=(listening, nonce, is_over), name="omni-nonce", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        is_over.close()


def _answer(listening: Collection[socket.socket], nonce: bytes, is_over: Wakeup) -> None:
    by_descriptor = {each.fileno(): each for each in listening}
    poll = select.poll()
    for descriptor in (*by_descriptor, is_over.fileno()):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == is_over.fileno():
                return
            # Who connected may have gone.
            with suppress(OSError):
                connection, _ = by_descriptor[descriptor].accept()
                with connection:
                    connection.sendall(nonce)
