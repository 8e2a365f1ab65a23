"""Passing messages from one ZMQ socket to another, in C unless they are looked at, in a thread of its own."""

import contextlib
import threading
from collections.abc import Callable, Sequence
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


def forward(
    name: str,
    source: Socket,
    sink: Socket,
    closes: Sequence[Socket],
    passes: Callable[[Sequence[Any]], bool] | None = None,
) -> threading.Thread:
    """Start to pass messages from `source` to `sink` until a context of theirs is terminated.

    With `passes`, which must not raise, only the messages are passed on of which it says so, in the thread.

    The thread owns both sockets until it ends, and closes `closes` then: exactly those of the terminated context, since
    the termination waits for them; that context must be a `forwarding_context`. Sockets of another context are the
    caller's again once the thread has been joined.

    A message of several parts may be cut by the end. libzmq takes back what was written of it to a socket that closes,
    so a `sink` in `closes` never gives its peer half a message. A `source` that is not closed may keep the other half.
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
                # libzmq's proxy ends with EAGAIN when a socket that was said to be readable has nothing after all, as
                # happens where messages come while a peer is still being admitted. Nothing is lost by that.
                with contextlib.suppress(zmq.Again):
                    zmq.proxy(source, sink)
    finally:
        for socket in closes:
            socket.close()
