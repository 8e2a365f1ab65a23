"""Keeps one coordinator process running on the same addresses."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager

import msgspec

from vllm_omni_plugin.coordinator.process.coordinator_process import ChildArguments, CoordinatorProcess
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import RECONNECT_MAX_MS
from vllm_omni_plugin.coordinator.state.list_deltas import KEEP_ALIVE_INTERVAL
from vllm_omni_plugin.keep_running import Backoff, keep_running
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

# Subscribers run on this machine. Our own heads have sessions instead.
LIST_HOST = "127.0.0.1"
START_TIMEOUT = 30.0
ANSWER_TIMEOUT = 10.0
ALIVE_BYTES_PER_TIMEOUT = 10
STOP_TIMEOUT = 5.0
FIRST_DELAY = 0.1
MAX_DELAY = 5.0
# After a child has run this long, the restart delay begins at FIRST_DELAY again.
STABLE_AFTER = 10.0


class OmniCoordinatorRuntime:
    """Owns a coordinator process, and restarts it on the same ports when it ends or hangs.

    Arguments as of `OmniCoordinator`; without ``settle_time`` it is the time, at most 5 s, in which replicas register
    again: they may have run with the coordinator of a head that this one replaces. Each new process reads
    ``secret_file`` again. Subscribers get a free port of 127.0.0.1. A process that does not answer for
    ``answer_timeout`` seconds is killed and restarted.

    Raises `ConfigError` for its arguments or the secret file, `OmniError` if the first process fails otherwise.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        heartbeat_timeout: float = 30.0,
        *,
        settle_time: float | None = None,
        secret_file: str | None = None,
        first_replica_ids: Mapping[int, int] | None = None,
        reserved_numbers: int = 0,
        fingerprints: Mapping[int, Mapping[str, str]] | None = None,
        answer_timeout: float = ANSWER_TIMEOUT,
    ) -> None:
        host = f"[{host}]" if ":" in host else host
        self._answer_timeout = answer_timeout
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._child: CoordinatorProcess | None = None
        self._first_start: Future[tuple[str, str]] = Future()
        self._arguments = ChildArguments(
            f"tcp://{host}:{port}",
            f"tcp://{LIST_HOST}:0",
            heartbeat_timeout,
            answer_timeout / ALIVE_BYTES_PER_TIMEOUT,
            _time_to_register(heartbeat_timeout) if settle_time is None else settle_time,
            secret_file=secret_file,
            first_replica_ids=dict(first_replica_ids or {}),
            reserved_numbers=reserved_numbers,
            fingerprints={stage_id: dict(fields) for stage_id, fields in (fingerprints or {}).items()},
        )
        # The child ends with the thread that creates it, so this thread lives as long as the runtime. It has no other
        # work, so its coroutines may block.
        name = "omni-coordinator-runtime"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name=name, daemon=True)
        self._thread.start()
        try:
            self.router_address, self.pub_address = self._first_start.result()
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int | None:
        """Id of the current process; None between two processes."""
        with self._lock:
            return self._child.pid if self._child else None

    def close(self) -> None:
        """End the process; kill it after 5 s. May be called again."""
        with self._lock:
            self._closing.set()
            if self._child:
                self._child.stop()
        self._thread.join(STOP_TIMEOUT)
        with self._lock:
            if self._child:
                self._child.kill()
        self._thread.join()

    async def _run(self) -> None:
        backoff = Backoff(FIRST_DELAY, MAX_DELAY, STABLE_AFTER)
        try:
            await keep_running(self._process, backoff, time.monotonic, self._pause)
        except BaseException as error:
            self._first_start.set_exception(error)

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[Awaitable[str]]:
        child = CoordinatorProcess(self._arguments)
        with self._lock:
            self._child = child
            if self._closing.is_set():
                child.stop()
        try:
            addresses = child.wait_ready(START_TIMEOUT)
            if self._first_start.done():
                logger.warning("The coordinator process was restarted on %s", addresses[0])
            else:
                router_address, pub_address = addresses
                self._arguments = msgspec.structs.replace(
                    self._arguments, router_zmq_addr=router_address, pub_zmq_addr=pub_address
                )
                self._first_start.set_result(addresses)
            yield self._watch(child)
        finally:
            child.kill()
            self._wait_for_end(child)

    async def _watch(self, child: CoordinatorProcess) -> str:
        """Wait until the process ends, or is silent for too long and is to be killed; returns why."""
        try:
            while child.is_alive(self._answer_timeout):
                pass
        except TimeoutError:
            return f"did not answer for {self._answer_timeout:g} s and is killed"
        return f"ended with exit status {self._wait_for_end(child)}"

    def _wait_for_end(self, child: CoordinatorProcess) -> int:
        status = child.wait()
        with self._lock:
            self._child = None
        return status

    async def _pause(self, seconds: float, reason: str | Exception) -> bool:
        if not self._closing.is_set():
            prefix = "could not be restarted: " if isinstance(reason, Exception) else ""
            logger.error("The coordinator process %s%s; next start in %.1f s", prefix, reason, seconds)
        return not self._closing.wait(seconds)


def _time_to_register(heartbeat_timeout: float) -> float:
    # By then each replica has connected again and sent a heartbeat, which it does at least three times per timeout. It
    # is not longer, because subscribers get a list every 5 s.
    return min(KEEP_ALIVE_INTERVAL, heartbeat_timeout / 3 + RECONNECT_MAX_MS / 1000)
