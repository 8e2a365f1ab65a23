"""One engine process behind a replica server: its sockets on this node, its watch, its end."""

import asyncio
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import Any

import zmq

from vllm_omni_plugin.replicas.engine_start import Launcher, Process, crashed, explained, start_engine
from vllm_omni_plugin.replicas.input_hub import InputHub
from vllm_omni_plugin.replicas.kv_events.cache_listener import listen_to_cache
from vllm_omni_plugin.replicas.kv_events.cache_log import CacheLog
from vllm_omni_plugin.replicas.output_slot import OutputSlot, SlotLink
from vllm_omni_plugin.replicas.stage_client import Codec, StageClient

HEAD_SLOTS = 32
"""Heads that may hold one replica at the same time, such as two with 16 API server processes each. The engine learns
the number of its outputs when it starts. One that nobody holds costs this process three descriptors and 50 KB."""


class ServedEngine:
    """A ready engine. Made by `start_served_engine`; lives on the loop that made it.

    Attributes:
        identity: the engine's ZMQ identity.
        ready_response: what the engine said of itself when it was ready, as vLLM encoded it.
        hub: the way into the engine.
        slots: the outputs for heads, by client index.
        cache_log: what it has cached; stays empty if it does not report that.
        client: the server's own client, on an output that heads do not get.
        lost: done with the reason once the engine has exited, announced its death or was given up.
        failed: whether it is lost because it crashed by itself or said what cannot be used.
    """

    def __init__(
        self,
        sockets: ExitStack,
        hub: InputHub,
        links: list[SlotLink],
        codec: Codec,
        replica_id: int,
        identity: bytes,
        process: Process,
        ready_response: bytes,
    ) -> None:
        self._sockets = sockets
        self._process = process
        self.identity = identity
        self.ready_response = ready_response
        self.hub = hub
        self.cache_log = CacheLog()
        self._listener = listen_to_cache(ready_response, self.cache_log.append, f"replica {replica_id}")
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.failed = False
        *head_links, own_link = links
        name = str(replica_id)
        self.slots = [OutputSlot(link, codec, name, index, self.give_up) for index, link in enumerate(head_links)]
        self.client = StageClient(own_link, codec, name, _ignore, self.give_up, len(head_links))
        self.client.start()
        hub.start()
        self._watching = True
        loop.add_reader(process.sentinel, self._exited)

    @property
    def pid(self) -> int:
        """Process id of the engine core."""
        return self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether it has been given up; `lost` is also done when nobody waits for that any more."""
        return self.lost.done() and not self.lost.cancelled()

    def give_up(self, reason: str) -> None:
        """The engine is lost, or cannot be used any more; the first reason stands."""
        self._stop_watching()
        if not self.lost.done():
            clients = (self.client, *(slot.client for slot in self.slots))
            self.failed = crashed(self._process, any(client.engine_failed for client in clients))
            self.lost.set_result(explained(reason, self._process))

    async def close(self, executor: Executor, timeout: float | None = None) -> None:
        """End the engine, reap its process, then give the sockets back.

        Args:
            executor: where the blocking wait runs.
            timeout: seconds the engine may take to end, or None for vLLM's default; then it is killed.
        """
        self._stop_watching()
        for slot in self.slots:
            slot.release()
        try:
            await asyncio.get_running_loop().run_in_executor(executor, partial(self._process.shutdown, timeout))
        finally:
            self._process.kill()
            for slot in self.slots:
                slot.close()
            self.client.close()
            if self._listener is not None:
                self._listener.close()
            self._sockets.close()

    def _exited(self) -> None:
        self.give_up(f"its engine process {self._process.pid} exited")

    def _stop_watching(self) -> None:
        if self._watching:
            self._watching = False
            asyncio.get_running_loop().remove_reader(self._process.sentinel)


async def start_served_engine(launcher: Launcher, codec: Codec, executor: Executor, replica_id: int) -> ServedEngine:
    """Start an engine with an output for each slot and one for the server; returns when it is ready.

    Args:
        launcher: starts the process.
        codec: see `StageClient`.
        executor: where the blocking parts run: spawning, and waiting for the model to load.
        replica_id: index of the engine among those of this node.

    Raises:
        ReplicaError: the engine ended before it was ready.
    """
    identity = launcher.identity(replica_id)
    with ExitStack() as sockets:
        hub = InputHub(launcher.new_ipc_address(), launcher.new_ipc_address())
        sockets.callback(hub.close)
        to_hub: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        # Unbounded, because these sends may not wait; what is sent is small, and the hub always takes it.
        to_hub.sndhwm = 0
        sockets.callback(to_hub.close, linger=0)
        to_hub.connect(hub.local_addr)
        links: list[SlotLink] = []
        for _ in range(HEAD_SLOTS + 1):
            links.append(SlotLink(to_hub, launcher.new_ipc_address(), identity))
            sockets.callback(links[-1].close)
        process, ready_response = await start_engine(
            launcher,
            executor,
            replica_id,
            hub.engine_addr,
            [link.output_addr for link in links],
            hub.receive_ready,
        )
        return ServedEngine(sockets.pop_all(), hub, links, codec, replica_id, identity, process, ready_response)


def _ignore(outputs: Any) -> None:
    """No request is ever sent with the server's own client index; statistics may come."""
