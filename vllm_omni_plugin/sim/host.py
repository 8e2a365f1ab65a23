"""The thread that simulated engines share: one event loop and one ZMQ context for all of a process."""

import asyncio
import threading
from collections.abc import Callable
from typing import Self, TypeVar

import uvloop
import zmq

from vllm_omni_plugin.replicas.server.descriptor_limits import raise_socket_limit

_T = TypeVar("_T")


class EngineHost:
    """Runs simulated engines beside whatever else the process does. Used as a context manager.

    Attributes:
        context: for the engines' sockets. ZMQ limits their number, which is raised here as far as ZMQ can.
    """

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        raise_socket_limit(self.context)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sim-engines", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread and close what engines have left open."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.context.destroy(linger=0)

    def run(self, function: Callable[[], _T]) -> _T:
        """Call a function on the engines' loop and return its result. Blocks; not for that loop itself."""

        async def call() -> _T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()
