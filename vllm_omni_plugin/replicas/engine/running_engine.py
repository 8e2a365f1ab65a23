"""A running engine of this node: its process, its client, and the detection of its end."""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import Any

from vllm_omni_plugin.replicas.engine.engine_start import Launcher, Process, start_engine
from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address
from vllm_omni_plugin.replicas.kv_events.cache_listener import CacheListener, OnCacheChange, listen_to_cache
from vllm_omni_plugin.replicas.links.engine_client import Codec, EngineClient
from vllm_omni_plugin.replicas.links.link import IpcLink, Link
from vllm_omni_plugin.replicas.links.shared_memory import SharedMemory

_ENDED_FROM_OUTSIDE = re.compile(
    r"SIGKILL|SIGTERM|SIGINT|exited with code 0\b"
    r"|^machine .*( has not answered for | was started again$|: it has lost the first machine: )"
)
"""Exits that are not crashes of the engine, so that no request is the cause. The out-of-memory killer sends SIGKILL;
vLLM's processes exit with code 0 when they are shut down. The last line has reasons of `Meetings`."""

EXIT_GRACE_S = 1.0
"""Seconds in which a lost engine may still exit before its loss is reported. The system closes its sockets first, and
only the exit status says whether a request may be the cause."""


class Engine:
    """One engine. Made by `start_local_engine` or `start_served_engine`; lives on the loop that made it.

    When it has exited, reported its death, or was marked lost, its client is dead, `client.engine_failed` is set, and
    `lost` is done with the reason, which `on_lost` gets; that does nothing unless replaced.
    """

    def __init__(
        self,
        process: Process,
        ready_response: bytes,
        link: Link,
        *,
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
        self.client = EngineClient(link, codec, name, on_outputs, self._end, client_index=client_index)
        self.client.start()
        self._reporting: asyncio.TimerHandle | None = None
        self._reason = ""
        self._watching = True
        asyncio.get_running_loop().add_reader(process.sentinel, self._exited)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        return self.client.is_busy

    def mark_lost(self, reason: str, engine_failed: bool = False) -> None:
        self.client.mark_dead(reason, engine_failed)

    def subscribe_cache(self, on_change: OnCacheChange) -> None:
        """Report the changes of the engine's prefix cache since its start, if it reports them; to one callback only."""
        if self._listener is not None:
            self._listener.close()
        self._listener = listen_to_cache(self.ready_response, on_change, f"engine {self.pid}")

    async def close(self, executor: Executor, timeout: float | None = None) -> None:
        """Shut the engine down within `timeout` seconds (None: 15), and close the sockets after that.

        Outputs are read until the engine has ended.
        """
        self._stop_watching()
        if self._reporting is not None:
            self._report()
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
        self._reason = f"its engine process {self.pid} exited"
        self.mark_lost(self._reason)
        self._report()

    def _end(self, reason: str) -> None:
        """Report the loss, but wait up to `EXIT_GRACE_S` for an exit that tells whether it was a crash."""
        self._reason = reason
        if self._watching and not self.client.engine_failed and not self._process.exit_reason():
            self._reporting = asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._report)
        else:
            self._report()

    def _report(self) -> None:
        """Report the loss. Killed from outside, by the memory killer too, it is no crash that a request could cause."""
        if self.lost.done():
            return
        self._stop_watching()
        reason = self._reason
        # Without an exit reason, the client's `engine_failed` stays what the engine itself reported.
        if ended := self._process.exit_reason():
            self.client.engine_failed = not _ENDED_FROM_OUTSIDE.search(ended)
            reason = f"{reason}: {ended}"
        self.lost.set_result(reason)
        self.on_lost(reason)

    def _stop_watching(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._watching:
            self._watching = False
            asyncio.get_running_loop().remove_reader(self._process.sentinel)


async def start_local_engine(
    launcher: Launcher,
    codec: Codec,
    executor: Executor,
    replica_id: int,
    on_outputs: Callable[[Any], None],
    *,
    stage_id: int = 0,
) -> Engine:
    """Start an engine that only this process uses. Arguments and errors as `start_engine` and `EngineClient`."""
    link = IpcLink(new_ipc_address(), new_ipc_address(), launcher.identity(replica_id))
    try:
        process, ready_response = await start_engine(
            launcher, executor, replica_id, link.input_addr, [link.output_addr], router=link.input_socket
        )
    except BaseException:
        link.close()
        raise
    # Only Python stages have shared memory.
    memory: SharedMemory | None = getattr(process, "memory", None)
    if memory is not None:
        link.share(memory)
    return Engine(process, ready_response, link, codec=codec, name=f"{stage_id}.{replica_id}", on_outputs=on_outputs)
