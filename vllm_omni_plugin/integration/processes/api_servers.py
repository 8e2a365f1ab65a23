"""Several API server processes on one socket: kept running one by one, ended together."""

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
from vllm_omni_plugin.replicas.server.node import task_group_with_signals
from vllm_omni_plugin.replicas.server.replica_server import ReplicaServer

logger = init_logger(__name__)

NOT_ACCEPTING = 2**31 - 1
"""What vLLM's API servers say of their open connections while they accept none."""

_LOOK_EVERY_S = 1.0
_GRACE_S = 10.0
"""Seconds beyond the time for requests that an API server may take to end."""


class ApiServerSupervisor:
    """Starts API server processes, and each again whenever it ends. Lives on one event loop.

    Args:
        connections: how many each has open, shared with them; `NOT_ACCEPTING` for one that does not serve.
        start: starts the process with this number; called in a thread of its own, since it may block.
        on_end: called with number and process id of each that has ended, before the next one is started.
        clock: monotonic seconds.
        delay: sleeps between restarts.
    """

    def __init__(
        self,
        connections: MutableSequence[int],
        start: Callable[[int], BaseProcess],
        on_end: Callable[[int, int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        delay: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self._connections = connections
        self._start = start
        self._on_end = on_end
        self._clock = clock
        self._delay = delay
        self._running: dict[int, BaseProcess] = {}
        self._stopping = asyncio.Event()
        self._hurrying = False
        self._stopped = asyncio.Event()
        # One thread: they are started in turns.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="omni-api-server")

    async def run(self) -> None:
        """Keep all of them running until `stop`; none is left when this returns, however it does.

        Raises:
            OmniError: one ended before it had ever served: so would the next.
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
        """Tell all of them to end, and kill what has not ended after `timeout` seconds. Returns when none is left."""
        self._stopping.set()
        for process in self._running.values():
            process.terminate()
        try:
            await asyncio.wait_for(self._stopped.wait(), timeout)
        except TimeoutError:
            logger.warning("%d API servers have not ended in time and are killed.", len(self._running))
            self.kill()
            await self._stopped.wait()

    def signal(self, signum: int) -> None:
        """Send a signal to those that serve, which heed it; others would end of it, and what they begin with is new."""
        for index, process in self._running.items():
            if self._connections[index] != NOT_ACCEPTING and process.pid is not None:
                os.kill(process.pid, signum)

    def kill(self) -> None:
        """End all of them at once, once `stop` has been called."""
        self._hurrying = True
        for process in self._running.values():
            process.kill()

    async def _keep(self, index: int) -> None:
        try:
            await keep_running(partial(self._api_server, index), Backoff(), self._clock, partial(self._pause, index))
        except (OmniError, OSError) as error:
            # What ends before it served is no fault once all are to end.
            if not self._stopping.is_set():
                raise OmniError(f"API server {index} {error}") from error

    @asynccontextmanager
    async def _api_server(self, index: int) -> AsyncIterator[Awaitable[str]]:
        """Start a process, and see that it has ended when this is exited."""
        # It waits for engines that are being spawned, and the loop has their replicas' heartbeats to answer.
        process = await spawn(self._spawner, partial(self._start, index), partial(self._end, index))
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        self._running[index] = process
        loop.add_reader(process.sentinel, ended.set)
        try:
            if self._hurrying:
                process.kill()
            elif self._stopping.is_set():
                process.terminate()
            # It says by shared memory only that it serves.
            while self._connections[index] == NOT_ACCEPTING:
                if ended.is_set():
                    raise OmniError(f"(process {process.pid}) ended with code {process.exitcode} before it served")
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _LOOK_EVERY_S)
            yield _how_it_ended(process, ended)
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

    async def _pause(self, index: int, seconds: float, reason: str | Exception) -> bool:
        if self._stopping.is_set():
            return False
        logger.error("API server %d %s; it is started again in %.0f s.", index, reason, seconds)
        waiting = [asyncio.ensure_future(self._delay(seconds)), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
        return not self._stopping.is_set()


async def _how_it_ended(process: BaseProcess, ended: asyncio.Event) -> str:
    await ended.wait()
    return f"(process {process.pid}) ended with code {process.exitcode}"


async def run_until_signal(
    api_servers: ApiServerSupervisor, replicas: Sequence[ReplicaServer], shutdown_timeout: float
) -> None:
    """Run API servers and replicas until SIGTERM or SIGINT: then the former end, and after them the latter.

    A second signal ends both at once. A replica that leaves the fleet ends by itself, and nothing else with it.

    Args:
        api_servers: not started.
        replicas: not started.
        shutdown_timeout: seconds that requests in flight have to finish.

    Raises:
        OmniError: a replica or an API server could not be started the first time. Nothing is left running.
    """
    told = asyncio.Event()

    def on_signal(signum: int) -> None:
        if told.is_set():
            logger.info("%s again: ending at once.", signal.Signals(signum).name)
            api_servers.kill()
        told.set()

    async with task_group_with_signals(on_signal) as tasks:
        tasks.create_task(api_servers.run())
        for replica in replicas:
            tasks.create_task(replica.run())
        await told.wait()
        logger.info("Ending: requests in flight have %g s.", shutdown_timeout)
        # Ctrl-C and some service managers tell engines, too, which then end once they have nothing to do.
        for replica in replicas:
            replica.disable_restarts()
        await api_servers.stop(shutdown_timeout + _GRACE_S)
        for replica in replicas:
            replica.stop_now("its head was told to end")
