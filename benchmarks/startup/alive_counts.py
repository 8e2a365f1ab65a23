"""Counts what is alive in this process for whoever asks: `soak.py`, of the processes that it starts."""

import asyncio
import gc
import json
import os
import socket
import threading

VARIABLE = "BENCHMARK_ALIVE_COUNTS"
"""Environment variable; where it is set, Python processes of benchmarks answer."""


def address(pid: int) -> str:
    """The abstract unix socket at which a process answers."""
    return f"\0benchmark-alive-{pid}"


def answer_for_ever() -> None:
    """Begin to answer, on a thread of its own."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address(os.getpid()))
    listener.listen()
    threading.Thread(target=_answer, args=(listener,), name="alive-counts", daemon=True).start()


def _answer(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(json.dumps(count()).encode())


def count() -> dict[str, int]:
    """Objects that the garbage collector knows after a collection, and the asyncio tasks among them.

    vLLM freezes what it has after its start, and what is frozen is not counted.
    """
    gc.collect()
    alive = gc.get_objects()
    # Not isinstance(), which asks proxies for their class.
    return {"tasks": sum(issubclass(type(each), asyncio.Task) for each in alive), "objects": len(alive)}
