"""Passing messages from one ZMQ socket to another in C, in a thread that never runs Python meanwhile."""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import zmq

Socket = zmq.Socket[Any]
Context = zmq.Context[Socket]

QUEUE_MESSAGES = 1000
"""Messages that a socket of the data path may hold for a peer before it leaves the rest to the sockets before it."""


def forwarding_context() -> Context:
    """A context for sockets that `forward` closes.

    Once it is being terminated their linger period can no longer be set, and with libzmq's default, for ever, the
    termination would wait for a peer that takes nothing.
    """
    context: Context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    return context


def forward(name: str, source: Socket, sink: Socket, closes: Sequence[Socket]) -> threading.Thread:
    """Start to pass messages from `source` to `sink` until a context of theirs is terminated.

    The thread owns both sockets until it ends, and closes `closes` then: exactly those of the terminated context, since
    the termination waits for them; that context must be a `forwarding_context`. Sockets of another context are the
    caller's again once the thread has been joined.

    A message of several parts may be cut by the end. libzmq takes back what was written of it to a socket that closes,
    so a `sink` in `closes` never gives its peer half a message. A `source` that is not closed may keep the other half.
    """
    thread = threading.Thread(target=_run, args=(source, sink, closes), name=name, daemon=True)
    thread.start()
    return thread


def _run(source: Socket, sink: Socket, closes: Sequence[Socket]) -> None:
    try:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                # libzmq's proxy ends with EAGAIN when a socket that was said to be readable has nothing after all, as
                # happens where messages come while a peer is still being admitted. Nothing is lost by that.
                with contextlib.suppress(zmq.Again):
                    zmq.proxy(source, sink)
    finally:
        for socket in closes:
            socket.close()
