"""A replica whose engine runs on this node: its process, link and client under one owner."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Protocol

from vllm_omni_plugin.replicas.link import IpcLink
from vllm_omni_plugin.replicas.stage_client import Codec, StageClient


class Process(Protocol):
    """A running engine; `vllm_api.launch.EngineProcess` in service."""

    @property
    def pid(self) -> int: ...

    @property
    def sentinel(self) -> int: ...

    def shutdown(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


class Starting(Protocol):
    """An engine that has been spawned and is not ready; `vllm_api.launch.StartingEngine` in service."""

    @property
    def process(self) -> Process: ...

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None: ...

    def abandon(self) -> None: ...


class Launcher(Protocol):
    """How engines are started; `vllm_api.launch.EngineLauncher` in service."""

    ready_timeout: float

    def new_ipc_address(self) -> str: ...

    def identity(self, replica_id: int) -> bytes: ...

    def start(self, replica_id: int) -> Starting: ...


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
        self._watching = True
        client.start()
        asyncio.get_running_loop().add_reader(process.sentinel, self._exited)

    @property
    def pid(self) -> int:
        """Process id of the engine core."""
        return self._process.pid

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

    def _exited(self) -> None:
        self._stop_watching()
        self.client.drain()
        self.client.mark_dead(f"its engine process {self._process.pid} exited")

    def _stop_watching(self) -> None:
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
) -> LocalReplica:
    """Start an engine and open the link to it; returns when it is ready.

    Args:
        launcher: starts the process.
        codec: see `StageClient`.
        executor: where the blocking parts run: spawning, and waiting for the model to load.
        replica_id: see `StageClient`; also the index of the engine among those of this node.
        on_outputs: see `StageClient`.
        on_dead: see `StageClient`.

    Raises:
        ReplicaError: the engine ended before it was ready.
    """
    loop = asyncio.get_running_loop()
    link = IpcLink(launcher.new_ipc_address(), launcher.new_ipc_address(), launcher.identity(replica_id))
    starting: Starting | None = None
    try:
        starting = await _spawn(launcher, executor, replica_id)
        waiting = loop.run_in_executor(executor, _wait_until_ready, starting, link, launcher.ready_timeout)
        try:
            ready_response = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            # The thread ends as soon as it sees its engine gone; the link is in its hands until then.
            starting.process.kill()
            await asyncio.wait([waiting])
            # Its failure is the expected one; unread, it would be reported whenever the future is collected.
            waiting.exception()
            raise
        client = StageClient(link, codec, replica_id, on_outputs, on_dead)
        return LocalReplica(starting.process, link, client, ready_response)
    except BaseException:
        if starting is not None:
            starting.process.kill()
        link.close()
        raise


async def _spawn(launcher: Launcher, executor: Executor, replica_id: int) -> Starting:
    spawning = asyncio.get_running_loop().run_in_executor(executor, launcher.start, replica_id)
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        # The thread goes on, and nobody else would ever know of the engine that it spawns.
        await asyncio.wait([spawning])
        if spawning.exception() is None:
            spawning.result().abandon()
        raise


def _wait_until_ready(starting: Starting, link: IpcLink, timeout: float) -> bytes:
    starting.wait(link.input_addr, [link.output_addr])
    return link.receive_ready(timeout)
