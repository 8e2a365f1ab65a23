"""Supervises several API server processes: restarts each when it ends, and ends all of them together."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.keep_running import Backoff, keep_running
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.engine.engine_start import spawn
from vllm_omni_plugin.replicas.replica_server.node import task_group_with_signals
from vllm_omni_plugin.replicas.replica_server.replica_server import ReplicaServer

logger = init_logger(__name__)

NOT_ACCEPTING = 2**31 - 1
"""The number of open connections that vLLM's API servers report while they accept none."""

_LOOK_EVERY_S = 1.0
_GRACE_S = 10.0
"""Seconds that an API server may take to end, in addition to the time for requests."""


class ApiServerSupervisor:
    """Starts API server processes, and restarts each when it ends. Used on one event loop.

    Shared memory has the number of open `connections` of each server; `NOT_ACCEPTING` if it does not serve. `start` is
    called in another thread, since it may block. `on_end` gets index and process id of each process that has ended.
    """

    def __init__(
        self,
        connections: MutableSequence[int],
        start: Callable[[int], BaseProcess],
        on_end: Callable[[int, int], None],
        *,
        delay: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self._connections = connections
        self._start = start
        self._on_end = on_end
        self._delay = delay
        self._running: dict[int, BaseProcess] = {}
        self._stopping = asyncio.Event()
        self._killing = False
        self._stopped = asyncio.Event()
        # One thread, so that the processes are started one after the other.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="omni-api-server")

    async def run(self) -> None:
        """Keep all servers running until `stop`. None is left when this returns or raises.

        Raises OmniError if a server ends before it ever served, since a restart would end the same way.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(self._connections)):
                    tasks.create_task(self._keep(index))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            self._spawner.shutdown(wait=False)
            self._stopped.set()

    async def stop(self, timeout: float) -> None:
        """Send SIGTERM to all servers, and SIGKILL after `timeout` seconds. Returns when none is left."""
        self._stopping.set()
        for process in self._running.values():
            process.terminate()
        try:
            await asyncio.wait_for(self._stopped.wait(), timeout)
        except TimeoutError:
            logger.warning("%d API servers have not ended in time and will be killed.", len(self._running))
            self.kill()
            await self._stopped.wait()

    def signal(self, signum: int) -> None:
        """Send a signal to all servers that serve. Others have no handler yet, so it would end them."""
        for index, process in self._running.items():
            if self._connections[index] != NOT_ACCEPTING and process.pid is not None:
                os.kill(process.pid, signum)

    def kill(self) -> None:
        """Kill all servers, after `stop` has been called."""
        self._killing = True
        for process in self._running.values():
            process.kill()

    async def _keep(self, index: int) -> None:
        """Restart an API server whenever it ends; one that never served ends the whole command."""
        try:
            await keep_running(
                partial(self._api_server, index), Backoff(), time.monotonic, partial(self._wait_to_restart, index)
            )
        except (OmniError, OSError) as error:
            # During a shutdown, a server may end before it has served.
            if not self._stopping.is_set():
                raise OmniError(f"API server {index} {error}") from error

    @asynccontextmanager
    async def _api_server(self, index: int) -> AsyncIterator[Awaitable[str]]:
        # In a thread: starting waits while engines are spawned, and the loop must answer heartbeats of replicas.
        process = await spawn(self._spawner, partial(self._start, index), partial(self._end, index))
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        self._running[index] = process
        loop.add_reader(process.sentinel, ended.set)
        try:
            if self._killing:
                process.kill()
            elif self._stopping.is_set():
                process.terminate()
            # Polled, because the server reports only through shared memory that it serves.
            while self._connections[index] == NOT_ACCEPTING:
                if ended.is_set():
                    raise OmniError(f"(process {process.pid}) ended with code {process.exitcode} before it served")
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _LOOK_EVERY_S)
            yield _exit_reason(process, ended)
        finally:
            loop.remove_reader(process.sentinel)
            del self._running[index]
            self._end(index, process)

    def _end(self, index: int, process: BaseProcess) -> None:
        process.kill()
        process.join()
        self._connections[index] = NOT_ACCEPTING
        assert process.pid is not None
        self._on_end(index, process.pid)

    async def _wait_to_restart(self, index: int, seconds: float, reason: str | Exception) -> bool:
        if self._stopping.is_set():
            return False
        logger.error("API server %d %s; it is restarted in %.0f s.", index, reason, seconds)
        waiting = [asyncio.ensure_future(self._delay(seconds)), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
        return not self._stopping.is_set()


async def _exit_reason(process: BaseProcess, ended: asyncio.Event) -> str:
    await ended.wait()
    return f"(process {process.pid}) ended with code {process.exitcode}"


async def run_until_signal(
    api_servers: ApiServerSupervisor, replicas: Sequence[ReplicaServer], shutdown_timeout: float
) -> None:
    """Run API servers and replicas until SIGTERM or SIGINT. Then end the API servers, and after them the replicas.

    Requests in flight have `shutdown_timeout` seconds to finish; a second signal kills the API servers. A replica that
    leaves the fleet affects nothing else. Raises OmniError if the first start of a process fails; then none is left.
    """
    signalled = asyncio.Event()

    def on_signal(signum: int) -> None:
        if signalled.is_set():
            logger.info("Second signal (%s): ending at once.", signal.Signals(signum).name)
            api_servers.kill()
        signalled.set()

    async with task_group_with_signals(on_signal) as tasks:
        tasks.create_task(api_servers.run())
        for replica in replicas:
            tasks.create_task(replica.run())
        await signalled.wait()
        logger.info("Shutting down: requests in flight have %g s.", shutdown_timeout)
        # Ctrl-C and some service managers signal engines too. They then end once they are idle.
        for replica in replicas:
            replica.disable_restarts()
        await api_servers.stop(shutdown_timeout + _GRACE_S)
        for replica in replicas:
            replica.stop_now("its head is shutting down")
