"""An engine of this node that is ready: its process, our client of it, and its end."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import Any

from vllm_omni_plugin.replicas.client.stage_client import Codec, StageClient
from vllm_omni_plugin.replicas.engine.engine_start import (
    Launcher,
    Process,
    SharingProcess,
    crashed,
    explained,
    start_engine,
)
from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address
from vllm_omni_plugin.replicas.kv_events.cache_listener import CacheListener, OnCacheChange, listen_to_cache
from vllm_omni_plugin.replicas.links.link import IpcLink, Link


class Engine:
    """One engine. Made by `start_local_engine` or `start_served_engine`; lives on the loop that made it.

    Args:
        process: the engine's.
        ready_response: what the engine said of itself when it was ready, as vLLM encoded it.
        link: the way to it for `client`, which owns the link.
        codec: see `StageClient`.
        name: of the replica, in errors and logs.
        on_outputs: see `StageClient`.
        client_index: see `StageClient`.

    Attributes:
        client: speaks to the engine. What makes it dead makes the engine lost.
        ready_response: as given.
        input_addr: where the client sends.
        output_addr: where the client receives.
        lost: done with the reason when the engine has exited, announced its death, or was given up. By then
            `client.engine_failed` says whether it crashed by itself.
        on_lost: called with the reason in the same step; does nothing unless replaced.
    """

    def __init__(
        self,
        process: Process,
        ready_response: bytes,
        link: Link,
        codec: Codec,
        name: str,
        on_outputs: Callable[[Any], None],
        client_index: int = 0,
    ) -> None:
        self._process = process
        self.ready_response = ready_response
        self.input_addr, self.output_addr = link.input_addr, link.output_addr
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_lost: Callable[[str], None] = lambda reason: None
        self._resources = ExitStack()
        self._listener: CacheListener | None = None
        self.client = StageClient(link, codec, name, on_outputs, self._end, client_index)
        self.client.start()
        self._watching = True
        asyncio.get_running_loop().add_reader(process.sentinel, self._exited)

    @property
    def pid(self) -> int:
        """Process id of the engine core."""
        return self._process.pid

    def mark_lost(self, reason: str, engine_failed: bool = False) -> None:
        """The engine cannot be used any more; the first reason stands."""
        self.client.mark_dead(reason, engine_failed)

    def subscribe_cache(self, on_change: OnCacheChange) -> None:
        """Tell what the engine has cached, from its start on, if it reports that; nobody who was told before."""
        if self._listener is not None:
            self._listener.close()
        self._listener = listen_to_cache(self.ready_response, on_change, f"engine {self.pid}")

    async def close(self, executor: Executor, timeout: float | None = None) -> None:
        """End the engine, reap its process, free the sockets. Outputs are still read while the engine ends.

        Args:
            executor: where the blocking wait runs.
            timeout: seconds the engine may take to end, or None for vLLM's default; then it is killed.
        """
        self._stop_watching()
        self.on_lost = lambda reason: None
        try:
            await asyncio.get_running_loop().run_in_executor(executor, partial(self._process.shutdown, timeout))
            self.client.drain()
        finally:
            self._process.kill()
            self.client.close()
            self._resources.close()
            if self._listener is not None:
                self._listener.close()

    def _exited(self) -> None:
        self._stop_watching()
        self.client.drain()
        self.mark_lost(f"its engine process {self.pid} exited")

    def _end(self, reason: str) -> None:
        self._stop_watching()
        self.client.engine_failed = crashed(self._process, self.client.engine_failed)
        reason = explained(reason, self._process)
        self.lost.set_result(reason)
        self.on_lost(reason)

    def _stop_watching(self) -> None:
        if self._watching:
            self._watching = False
            asyncio.get_running_loop().remove_reader(self._process.sentinel)


async def start_local_engine(
    launcher: Launcher,
    codec: Codec,
    executor: Executor,
    replica_id: int,
    on_outputs: Callable[[Any], None],
    stage_id: int = 0,
) -> Engine:
    """Start an engine whose requests are all of this process; returns when it is ready.

    Args:
        launcher: starts the process.
        codec: see `StageClient`.
        executor: where the blocking parts run: spawning, and waiting for the model to load.
        replica_id: index of the engine among those of its stage on this node.
        on_outputs: see `StageClient`.
        stage_id: its stage.

    Raises:
        ReplicaError: the engine ended before it was ready.
    """
    link = IpcLink(new_ipc_address(), new_ipc_address(), launcher.identity(replica_id))
    try:
        process, ready_response = await start_engine(
            launcher, executor, replica_id, link.input_addr, [link.output_addr], link.input_socket
        )
    except BaseException:
        link.close()
        raise
    if isinstance(process, SharingProcess) and process.memory is not None:
        link.share(process.memory)
    return Engine(process, ready_response, link, codec, f"{stage_id}.{replica_id}", on_outputs)
