"""Several API server processes on one socket: kept running one by one, ended together."""

import asyncio
import time
from collections.abc import Callable, Coroutine, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.backoff import RestartBackoff
from vllm_omni_plugin.replicas.engine_start import spawn

logger = init_logger(__name__)

NOT_ACCEPTING = 2**31 - 1
"""What vLLM's API servers say of their open connections while they accept none."""

_LOOK_EVERY_S = 1.0


class ApiServer(Protocol):
    """A running process; `multiprocessing.Process` in service."""

    @property
    def pid(self) -> int | None: ...

    @property
    def sentinel(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def join(self) -> None: ...


class ApiServers:
    """Starts API server processes, and each again whenever it ends. Lives on one event loop.

    Args:
        connections: how many each has open, shared with them; `NOT_ACCEPTING` for one that does not serve.
        start: starts the process with this number; called in a thread of its own, since it may block.
        bury: told number and process id of each that has ended, before the next one is started.
        clock: monotonic seconds.
        delay: sleeps between restarts.
    """

    def __init__(
        self,
        connections: MutableSequence[int],
        start: Callable[[int], ApiServer],
        bury: Callable[[int, int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        delay: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self._connections = connections
        self._start = start
        self._bury = bury
        self._clock = clock
        self._delay = delay
        self._running: dict[int, ApiServer] = {}
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

    def kill(self) -> None:
        """End all of them at once, once `stop` has been called."""
        self._hurrying = True
        for process in self._running.values():
            process.kill()

    async def _keep(self, index: int) -> None:
        backoff = RestartBackoff()
        has_served = False
        while not self._stopping.is_set():
            started_at = self._clock()
            served, end = await self._run_one(index)
            has_served = has_served or served
            if self._stopping.is_set():
                return
            if not has_served:
                raise OmniError(f"API server {index} {end} before it served")
            pause = backoff.after(self._clock() - started_at if served else 0.0)
            logger.error("API server %d %s; it is started again in %.0f s.", index, end, pause)
            await self._pause(pause)

    async def _run_one(self, index: int) -> tuple[bool, str]:
        """Start a process and wait until it has ended; return whether it has served, and how it ended."""
        try:
            # It waits for engines that are being spawned, and the loop has their replicas' heartbeats to answer.
            process = await spawn(self._spawner, partial(self._start, index), partial(self._end, index))
        except OSError as error:
            return False, f"could not be started ({error})"
        served = await self._watch(index, process)
        return served, f"(process {process.pid}) ended with code {process.exitcode}"

    async def _watch(self, index: int, process: ApiServer) -> bool:
        """Wait until a process has ended; return whether it has served."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        self._running[index] = process
        loop.add_reader(process.sentinel, ended.set)
        if self._hurrying:
            process.kill()
        elif self._stopping.is_set():
            process.terminate()
        served = False
        try:
            while not ended.is_set():
                # It tells by shared memory only, and takes that back if it ends in order.
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), None if served else _LOOK_EVERY_S)
                served = served or self._connections[index] != NOT_ACCEPTING
            return served
        finally:
            loop.remove_reader(process.sentinel)
            del self._running[index]
            self._end(index, process)

    def _end(self, index: int, process: ApiServer) -> None:
        process.kill()
        process.join()
        self._connections[index] = NOT_ACCEPTING
        assert process.pid is not None
        self._bury(index, process.pid)

    async def _pause(self, seconds: float) -> None:
        waiting = [asyncio.ensure_future(self._delay(seconds)), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
