"""A replica whose engine runs on this node: its process, link and client under one owner."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from vllm_omni_plugin.replicas.engine_start import Launcher, Process, SharingProcess, crashed, explained, start_engine
from vllm_omni_plugin.replicas.kv_events.cache_listener import CacheListener, OnCacheChange, listen_to_cache
from vllm_omni_plugin.replicas.link import IpcLink
from vllm_omni_plugin.replicas.probe import Probe
from vllm_omni_plugin.replicas.stage_client import Codec, StageClient


class LocalReplica:
    """One engine on this node. Made by `start_local_replica`; lives on the loop that made it.

    Attributes:
        client: speaks to the engine.
        ready_response: what the engine said of itself when it was ready, as vLLM encoded it.
    """

    def __init__(self, process: Process, link: IpcLink, client: StageClient, ready_response: bytes) -> None:
        self.client = client
        self.ready_response = ready_response
        self.input_addr = link.input_addr
        self.output_addr = link.output_addr
        self._process = process
        self._listener: CacheListener | None = None
        self._watching = True
        self._probing: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None
        client.start()
        asyncio.get_running_loop().add_reader(process.sentinel, self._exited)

    @property
    def pid(self) -> int:
        """Process id of the engine core."""
        return self._process.pid

    def follow_cache(self, on_change: OnCacheChange) -> None:
        """Tell what the engine has cached, from its start on, if it reports that; nobody who was told before."""
        if self._listener is not None:
            self._listener.close()
        self._listener = listen_to_cache(self.ready_response, on_change, f"local engine {self.pid}")

    def watch(
        self,
        interval: float,
        timeout: float,
        clock: Callable[[], float],
        on_hang: Callable[[str], None],
        take_back: Callable[[], Awaitable[None]],
    ) -> None:
        """See whether the engine hangs, which is not killed, since a long step looks the same. To be called once.

        Args:
            interval: see `Probe`.
            timeout: see `Probe`.
            clock: see `Probe`.
            on_hang: called with the reason when it hangs; calls that are open fail.
            take_back: puts it back into service, once it has answered and was reset. If it raises, the engine is dead
                to everybody.
        """
        probe = Probe(
            self.client, interval, timeout, partial(self._hangs, on_hang), partial(self._answers, take_back), clock
        )
        self._probing = probe.start(self.client.mark_dead)

    async def close(self, executor: Executor, timeout: float | None = None) -> None:
        """End the engine, close the link, reap the process. Outputs are still read while the engine ends.

        Args:
            executor: where the blocking wait runs.
            timeout: seconds the engine may take to end, or None for vLLM's default; then it is killed.
        """
        self._stop_watching()
        try:
            await asyncio.get_running_loop().run_in_executor(executor, partial(self._process.shutdown, timeout))
            self.client.drain()
        finally:
            self._process.kill()
            self.client.close()
            if self._listener is not None:
                self._listener.close()

    def _exited(self) -> None:
        self._stop_watching()
        self.client.drain()
        self.client.mark_dead(f"its engine process {self._process.pid} exited")

    def _hangs(self, on_hang: Callable[[str], None], reason: str) -> None:
        if self._returning is not None:
            self._returning.cancel()
        on_hang(reason)
        self.client.interrupt(reason)

    def _answers(self, take_back: Callable[[], Awaitable[None]]) -> None:
        self._returning = asyncio.create_task(self._return(take_back), name="omni-return")

    async def _return(self, take_back: Callable[[], Awaitable[None]]) -> None:
        try:
            await self.client.reset()
            await take_back()
        except Exception as error:
            # Whatever went wrong, an engine that is given up here must be started afresh.
            self.client.mark_dead(f"it hung, and could not be taken back: {error}")

    def _stop_watching(self) -> None:
        for task in (self._probing, self._returning):
            if task is not None:
                task.cancel()
        if self._watching:
            self._watching = False
            asyncio.get_running_loop().remove_reader(self._process.sentinel)


async def start_local_replica(
    launcher: Launcher,
    codec: Codec,
    executor: Executor,
    replica_id: int,
    on_outputs: Callable[[Any], None],
    on_dead: Callable[[str], None],
    stage_id: int = 0,
) -> LocalReplica:
    """Start an engine and open the link to it; returns when it is ready.

    Args:
        launcher: starts the process.
        codec: see `StageClient`.
        executor: where the blocking parts run: spawning, and waiting for the model to load.
        replica_id: index of the engine among those of its stage on this node.
        on_outputs: see `StageClient`.
        on_dead: see `StageClient`.
        stage_id: its stage.

    Raises:
        ReplicaError: the engine ended before it was ready.
    """
    link = IpcLink(launcher.new_ipc_address(), launcher.new_ipc_address(), launcher.identity(replica_id))
    try:
        process, ready_response = await start_engine(
            launcher, executor, replica_id, link.input_addr, [link.output_addr], link.receive_ready
        )
        if isinstance(process, SharingProcess) and process.memory is not None:
            link.share(process.memory)

        def dead(reason: str) -> None:
            client.engine_failed = crashed(process, client.engine_failed)
            on_dead(explained(reason, process))

        client = StageClient(link, codec, f"{stage_id}.{replica_id}", on_outputs, dead)
        return LocalReplica(process, link, client, ready_response)
    except BaseException:
        link.close()
        raise
