"""For `threads.py`: tells the kernel what threads are called, and gives vLLM's client a thread of its own."""

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

VARIABLE = "BENCHMARK_THREADS"
"""Environment variable; where it is set, threads have their names in the kernel, too."""
READING = "reading"
"""Its value where vLLM's client shall have a thread that reads and writes its sockets."""
NAME = "socket-thread"
_CLIENT = "vllm.v1.engine.core_client"


def prepare() -> None:
    """What the variable asks for; vLLM's module is changed when it is imported."""
    threading.Thread.run = _named(threading.Thread.run)  # type: ignore[method-assign, assignment]
    if os.environ[VARIABLE] == READING:
        sys.meta_path.insert(0, _ClientFinder())


def _named(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def named_run(thread: threading.Thread) -> None:
        with suppress(OSError), open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm:
            comm.write(thread.name[:15])
        run(thread)

    return named_run


class _ClientFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _CLIENT:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        run_module = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run_module(module)
            module.AsyncMPClient._ensure_output_queue_task = _begin

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Handover:
    """Items for another thread's loop, with one wake-up for all that come before it gets them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[Any], None]) -> None:
        self._loop, self._handle, self._lock = loop, handle, threading.Lock()
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        with self._lock:
            self._items.append(item)
            is_first = len(self._items) == 1
        if is_first:
            self._loop.call_soon_threadsafe(self._handle_all)

    def _handle_all(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        for item in items:
            self._handle(item)


def _begin(client: Any) -> None:
    """In place of `_ensure_output_queue_task`: the least that a thread between AsyncLLM and the engines does."""
    resources = client.resources
    if resources.output_queue_task is not None:
        return
    # It stands for vLLM's task, which the client ends by cancelling it.
    resources.output_queue_task = asyncio.create_task(asyncio.Event().wait())
    to_client = _Handover(asyncio.get_running_loop(), lambda outputs: _deal_with(client, outputs))
    ready = threading.Event()
    threading.Thread(target=_run, name=NAME, args=(client, to_client, ready), daemon=True).start()
    ready.wait()


def _deal_with(client: Any, outputs: Any) -> None:
    if outputs.utility_output:
        sys.modules[_CLIENT]._process_utility_output(outputs.utility_output, client.utility_results)
        return
    if hasattr(client, "process_engine_outputs"):
        # It never waits.
        with suppress(StopIteration):
            client.process_engine_outputs(client, outputs).send(None)
    if outputs.outputs or outputs.scheduler_stats:
        client.outputs_queue.put_nowait(outputs)


async def _nothing() -> None:
    """What there is to wait for after a send."""


def _run(client: Any, to_client: _Handover, ready: threading.Event) -> None:
    # Imported here, since every Python process of a benchmark imports this module.
    import uvloop
    import zmq

    from vllm_omni_plugin.replicas.links.link import SocketReader

    async def serve() -> None:
        read: zmq.Socket[bytes] = zmq.Socket.shadow(client.resources.output_socket.underlying)
        written: zmq.Socket[bytes] = zmq.Socket.shadow(client.input_socket.underlying)

        def received(frames: list[Any]) -> None:
            client.resources.validate_alive(frames)
            to_client.put(client.decoder.decode(frames))

        def send(message: tuple[Any, Any, bytes]) -> None:
            kind, request, engine = message
            written.send_multipart((engine, kind.value, *client.encoder.encode(request)), zmq.NOBLOCK, copy=False)

        to_engines = _Handover(asyncio.get_running_loop(), send)

        def send_input(kind: Any, request: Any, engine: bytes | None = None) -> Awaitable[None]:
            client.ensure_alive()
            to_engines.put((kind, request, client.core_engine if engine is None else engine))
            return _nothing()

        client._send_input = send_input
        SocketReader(read, received).resume()
        ready.set()
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
