"""The orchestrator's thread, started and closed from AsyncLLM's thread."""

import asyncio
import threading
from concurrent.futures import CancelledError, Future
from typing import Any

import uvloop

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.attachment.local_replicas import LocalReplicas
from vllm_omni_plugin.orchestrator.attachment.remote_replicas import RemoteReplicas
from vllm_omni_plugin.orchestrator.fleet_control import FleetControl
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.other_loop import call_on
from vllm_omni_plugin.vllm_api.launch.spawning import EXIT_TIMEOUT_S

logger = init_logger(__name__)

_THREAD_TIMEOUT_S = 10.0
"""Seconds that closing may take beyond the engines' timeout before the thread is abandoned."""


class OrchestratorThread:
    """Owns the thread, its event loop, the orchestrator and its replicas; ends them in reverse order.

    Other threads reach the orchestrator by its queues. Without `remote_replicas` nothing can join.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        control: FleetControl,
        local_replicas: LocalReplicas,
        remote_replicas: RemoteReplicas | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._control = control
        self._local_replicas = local_replicas
        self._remote_replicas = remote_replicas
        self._started: Future[list[list[bytes]]] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Future[float | None] | None = None
        self._running = threading.Event()
        self._finishing: Future[float] | None = None
        self._wait_cancelled = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="omni-orchestrator", daemon=True)

    def start(self) -> list[list[bytes]]:
        """Start the thread; returns the ready responses of the local engines that serve, by stage. Blocks.

        ReplicaError: a local engine did not start, and nothing is left running.
        """
        self._thread.start()
        try:
            return self._started.result()
        except BaseException:
            # Also KeyboardInterrupt while the model loads.
            self.close(timeout=0.0)
            raise

    def wait_for_requests(self, timeout: float) -> float:
        """Wait up to `timeout` seconds until no request is unfinished; restart no engine from now on. Blocks.

        Returns:
            The seconds left; 0 if requests are unfinished, or the orchestrator has ended.
        """
        if not self._thread.is_alive():
            return 0.0
        self._running.wait()
        if self._loop is None:
            return 0.0
        waiting = self._wait_for_requests(timeout)
        try:
            finishing = self._finishing = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        except RuntimeError:
            # The loop has just ended.
            waiting.close()
            return 0.0
        if self._wait_cancelled:
            finishing.cancel()
        try:
            return finishing.result(timeout + _THREAD_TIMEOUT_S)
        except (CancelledError, TimeoutError):
            # The orchestrator has failed or hangs, or `cancel_wait` was called.
            return 0.0

    def cancel_wait(self) -> None:
        """End `wait_for_requests` now, or as soon as it is called. Never blocks; from any thread."""
        self._wait_cancelled = True
        if self._finishing is not None:
            self._finishing.cancel()

    def close(self, timeout: float | None = None) -> None:
        """End the engines within `timeout` seconds (None: 15), then the thread. Blocks; idempotent."""
        with self._closing:
            if not self._thread.is_alive():
                return
            self._running.wait()
            call_on(self._loop, self._request_stop, timeout)
            self._thread.join((EXIT_TIMEOUT_S if timeout is None else timeout) + _THREAD_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("The orchestrator thread did not end in time; it ends with the process.")

    def _request_stop(self, timeout: float | None) -> None:
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(timeout)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            else:
                logger.exception("The orchestrator failed; the server cannot go on.")
        finally:
            self._running.set()
            self._orchestrator.close_queues()
            if not self._started.done():
                self._started.set_exception(ReplicaError("the fleet was closed while it started"))

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = self._loop.create_future()
        self._running.set()
        timeout: float | None = None
        serving = asyncio.create_task(self._control.run(), name="omni-orchestrator")
        try:
            if not await self._start():
                return
            awaited: list[asyncio.Future[Any]] = [self._stop, serving]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            timeout = self._stop.result() if self._stop.done() else None
        finally:
            if self._remote_replicas is not None:
                await self._remote_replicas.close()
            await self._local_replicas.close(timeout)
            self._orchestrator.close_queues()
            await serving

    async def _wait_for_requests(self, timeout: float) -> float:
        """Wait until nothing is in flight, without restarts; returns the seconds that are left."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout
        self._local_replicas.disable_restarts()
        try:
            async with asyncio.timeout_at(ends_at):
                finished = await self._orchestrator.wait_until_idle()
        except TimeoutError:
            return 0.0
        return max(0.0, ends_at - loop.time()) if finished else 0.0

    async def _start(self) -> bool:
        """Start the local replicas unless `close` is called before. Returns whether it was not."""
        assert self._stop is not None
        starting = asyncio.create_task(self._local_replicas.start(), name="omni-start")
        awaited: list[asyncio.Future[Any]] = [starting, self._stop]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return False
        self._started.set_result(starting.result())
        return True
