"""Starts simulated engines in this process, with the interfaces of engine processes."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

import uvloop
import zmq

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.engine.engine_start import Launcher
from vllm_omni_plugin.replicas.replica_server.descriptor_limits import raise_socket_limit
from vllm_omni_plugin.sim.model.engine_model import EngineModel
from vllm_omni_plugin.sim.model.engine_settings import EngineSettings
from vllm_omni_plugin.sim.sim_engine import SimulatedEngine

_T = TypeVar("_T")


class EngineHost:
    """A context manager with a thread, an event loop and a ZMQ context for simulated engines."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        raise_socket_limit(self.context)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sim-engines", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread and close sockets that are still open."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.context.destroy(linger=0)

    def run(self, function: Callable[[], _T]) -> _T:
        """Call a function on the engines' loop and return its result. Blocks; do not call it on that loop."""

        async def call() -> _T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()


class SimProcess:
    """A simulated engine; a `replicas.engine.engine_start.Process`. Thread-safe. The host must outlive it."""

    def __init__(
        self, host: EngineHost, model: EngineModel, log_stats: bool, identity: bytes, ready_response: bytes
    ) -> None:
        self.pid = os.getpid()
        self.sentinel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.sentinel)
        self._host = host
        self._identity = identity
        self._ready_response = ready_response
        self._ended = threading.Event()
        self.engine = host.run(lambda: SimulatedEngine(model, log_stats, self._on_end))

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None:
        """Make the engine connect to these addresses and serve. Raises ReplicaError if it has ended already."""
        if self.ended:
            raise ReplicaError("the simulated engine was ended before it was ready")
        connect, context = self.engine.connect, self._host.context
        self._host.run(lambda: connect(context, self._identity, input_addr, output_addrs, self._ready_response))

    def exit_reason(self) -> str:
        """Why the engine died, if it announced its death; else ""."""
        return f"it died: {self.engine.death_reason}" if self.engine.death_reason else ""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine at once; messages that it has sent still arrive. Idempotent."""
        if not self.ended:
            self._host.run(self.engine.end)

    def kill(self) -> None:
        """End the engine without an announcement, as SIGKILL does. Idempotent."""
        if not self.ended:
            self._host.run(lambda: self.engine.end(linger_ms=0))

    abandon = kill

    def _on_end(self) -> None:
        self._ended.set()
        os.eventfd_write(self.sentinel, 1)


@dataclass(eq=False)
class SimLauncher(Launcher):
    """Starts simulated engines; `processes` has the latest one of each replica."""

    host: EngineHost
    settings: EngineSettings
    ready_response: Callable[[int], bytes]
    log_stats: bool = True
    ready_timeout: float = 10.0
    ready_timeout_variable: str = ""
    processes: dict[int, SimProcess] = field(default_factory=dict)

    def identity(self, replica_id: int) -> bytes:
        return replica_id.to_bytes(2, "little")

    def start(self, replica_id: int) -> SimProcess:
        model, identity = EngineModel(self.settings), self.identity(replica_id)
        process = SimProcess(self.host, model, self.log_stats, identity, self.ready_response(replica_id))
        self.processes[replica_id] = process
        return process
