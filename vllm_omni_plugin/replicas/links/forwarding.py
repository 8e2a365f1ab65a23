"""Passes messages from one ZMQ socket to another in a thread: in C, unless they are filtered."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

Socket = zmq.Socket[Any]
Context = zmq.Context[Socket]

QUEUE_MESSAGES = 1000
"""Queue length of a socket of the data path. Further messages wait in the sockets before it."""


def forwarding_context() -> Context:
    """A context with linger 0 for sockets that `forward` closes. Otherwise the termination would wait for the peers."""
    context: Context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    return context


def forward(
    name: str,
    source: Socket,
    sink: Socket,
    closes: Sequence[Socket],
    passes: Callable[[Sequence[Any]], bool] | None = None,
) -> threading.Thread:
    """Start to pass messages from `source` to `sink` until the context of one of them is terminated.

    With `passes`, a filter that must not raise, only the messages for which it returns True are passed.

    The thread owns both sockets until it ends. Then it closes `closes`, which must be exactly the sockets of the
    terminated context, a `forwarding_context`. Sockets of another context belong to the caller once the thread is
    joined.

    The end may cut a multipart message, which is then lost as a whole: libzmq rolls back what a `sink` in `closes` has
    of it, and the thread discards what a `source` of the caller has of it.
    """
    thread = threading.Thread(target=_run, args=(source, sink, closes, passes), name=name, daemon=True)
    thread.start()
    return thread


def _run(
    source: Socket, sink: Socket, closes: Sequence[Socket], passes: Callable[[Sequence[Any]], bool] | None
) -> None:
    try:
        with contextlib.suppress(zmq.ContextTerminated):
            while passes is not None:
                frames = source.recv_multipart(copy=False)
                if passes(frames):
                    sink.send_multipart(frames, copy=False)
            while True:
                # libzmq's proxy ends with EAGAIN if a readable socket has no message after all, for example while a
                # peer is being authenticated. No message is lost.
                with contextlib.suppress(zmq.Again):
                    zmq.proxy(source, sink)
    finally:
        for socket in closes:
            socket.close()
        if source not in closes:
            _discard_rest(source)


def _discard_rest(socket: Socket) -> None:
    """Discard the frames of a message whose first frames were read. Otherwise they would be read as a message."""
    with contextlib.suppress(zmq.ZMQError):
        while socket.getsockopt(zmq.RCVMORE):
            socket.recv(zmq.NOBLOCK, copy=False)
