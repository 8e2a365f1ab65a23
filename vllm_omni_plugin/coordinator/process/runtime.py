"""Keeps one coordinator running in its own process, on the same addresses, for as long as its owner lives."""

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

# Whoever subscribes to lists runs on this machine; our own heads have sessions instead.
LIST_HOST = "127.0.0.1"
START_TIMEOUT = 30.0
ANSWER_TIMEOUT = 10.0
BEATS_PER_TIMEOUT = 10
STOP_TIMEOUT = 5.0
FIRST_DELAY = 0.1
MAX_DELAY = 5.0
# A child that served this long had no trouble in starting: the next restart is the first one again.
STABLE_AFTER = 10.0


class OmniCoordinatorRuntime:
    """Owns a coordinator process: starts it, restarts it on the same ports when it ends or hangs, ends it with itself.

    One thread reads the beats of the process, behind which its serving thread stands.

    Args:
        host: Name or address to bind for replicas and heads, IPv6 without brackets.
        port: Port for them; 0 for any free one. Subscribers get a free one of 127.0.0.1 in any case.
        heartbeat_timeout: Seconds of silence after which a replica is dead.
        secret_file: Path of the secrets of the fleet; the child reads it anew whenever it is restarted.
        first_replica_ids: See `OmniCoordinator`.
        fingerprints: See `OmniCoordinator`.
        answer_timeout: Seconds without a beat after which the process is killed and restarted.

    Attributes:
        router_address: Where replicas report, and heads connect.
        pub_address: Where third parties subscribe to lists.

    Raises:
        ConfigError: The coordinator cannot bind, the timeout is not positive, or the secret file is refused.
        OmniError: The process ended, or did not answer in time, before it was ready.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        heartbeat_timeout: float = 30.0,
        *,
        secret_file: str | None = None,
        first_replica_ids: Mapping[int, int] | None = None,
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
            answer_timeout / BEATS_PER_TIMEOUT,
            secret_file=secret_file,
            first_replica_ids=dict(first_replica_ids or {}),
            fingerprints={stage_id: dict(fields) for stage_id, fields in (fingerprints or {}).items()},
        )
        # Linux tells the child of the end of the thread that made it, so this thread lives as long as the runtime. It
        # has no other work, so what it runs may block.
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
        """The process now in charge, or None between two."""
        with self._lock:
            return self._child.pid if self._child else None

    def close(self) -> None:
        """End the process and wait for it; it is killed if it has not ended within 5 s. May be called again."""
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
                logger.warning("The coordinator process serves again on %s", addresses[0])
            else:
                self._arguments = _again(self._arguments, *addresses)
                self._first_start.set_result(addresses)
            yield self._end_of(child)
        finally:
            child.kill()
            self._wait_for_end(child)

    async def _end_of(self, child: CoordinatorProcess) -> str:
        """Wait until the process ends or hangs; return which of them."""
        try:
            while child.beats(self._answer_timeout):
                pass
        except TimeoutError:
            return f"did not answer for {self._answer_timeout:g} s and is killed"
        return f"ended with code {self._wait_for_end(child)}"

    def _wait_for_end(self, child: CoordinatorProcess) -> int:
        code = child.wait()
        with self._lock:
            self._child = None
        return code

    async def _pause(self, seconds: float, reason: str | Exception) -> bool:
        if not self._closing.is_set():
            what = "could not be restarted:" if isinstance(reason, Exception) else ""
            logger.error("The coordinator process %s %s; next start in %.1f s", what, reason, seconds)
        return not self._closing.wait(seconds)


def _again(first: ChildArguments, router_address: str, pub_address: str) -> ChildArguments:
    """What later processes are told: to serve where the first one does, once they know who is there."""
    return msgspec.structs.replace(
        first,
        router_zmq_addr=router_address,
        pub_zmq_addr=pub_address,
        # By then every replica has connected again and sent a heartbeat, which it does at least three times per
        # timeout. No longer than that, because heads were promised a list every 5 s.
        settle_time=min(KEEP_ALIVE_INTERVAL, first.heartbeat_timeout / 3 + RECONNECT_MAX_MS / 1000),
    )
