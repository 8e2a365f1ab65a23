"""Keeps one coordinator running in its own process, on the same addresses, for as long as its owner lives."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future

from vllm_omni_plugin.coordinator.process import ChildArguments, CoordinatorProcess, Ready
from vllm_omni_plugin.coordinator.publishing import KEEP_ALIVE_INTERVAL
from vllm_omni_plugin.coordinator.sockets import RECONNECT_MAX_MS
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

# Whoever subscribes to lists runs on this machine; our own heads take a seat instead.
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
        first_numbers: See `OmniCoordinator`.
        answer_timeout: Seconds without a beat after which the process is killed and restarted.

    Attributes:
        router_address: Where replicas report, and heads take their seats.
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
        first_numbers: Mapping[int, int] | None = None,
        answer_timeout: float = ANSWER_TIMEOUT,
    ) -> None:
        host = f"[{host}]" if ":" in host else host
        self._answer_timeout = answer_timeout
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._child: CoordinatorProcess | None = None
        first_start: Future[Ready] = Future()
        first = ChildArguments(
            f"tcp://{host}:{port}",
            f"tcp://{LIST_HOST}:0",
            heartbeat_timeout,
            answer_timeout / BEATS_PER_TIMEOUT,
            secret_file=secret_file,
            first_numbers=dict(first_numbers or {}),
        )
        self._thread = threading.Thread(
            target=self._supervise, args=(first, first_start), name="omni-coordinator-runtime", daemon=True
        )
        self._thread.start()
        try:
            ready = first_start.result()
        except BaseException:
            self.close()
            raise
        self.router_address = ready.router_address
        self.pub_address = ready.pub_address

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

    def _supervise(self, first: ChildArguments, first_start: "Future[Ready]") -> None:
        try:
            child, ready = self._start(first)
        except BaseException as error:
            first_start.set_exception(error)
            return
        first_start.set_result(ready)
        again = ChildArguments(
            ready.router_address,
            ready.pub_address,
            first.heartbeat_timeout,
            first.beat_interval,
            secret_file=first.secret_file,
            # By then every replica has connected again and sent a heartbeat, which it does at least three times per
            # timeout. No longer than that, because heads were promised a list every 5 s.
            settle_time=min(KEEP_ALIVE_INTERVAL, first.heartbeat_timeout / 3 + RECONNECT_MAX_MS / 1000),
            first_numbers=first.first_numbers,
        )
        self._keep_running(child, again)

    def _keep_running(self, child: CoordinatorProcess, again: ChildArguments) -> None:
        delay = FIRST_DELAY
        while True:
            started_at = time.monotonic()
            ended = self._wait_for_loss(child)
            if self._closing.is_set():
                return
            if time.monotonic() - started_at >= STABLE_AFTER:
                delay = FIRST_DELAY
            logger.error("The coordinator process %s; it is restarted in %.1f s", ended, delay)
            restarted = self._restart(again, delay)
            if restarted is None:
                return
            child = restarted
            delay = min(MAX_DELAY, delay * 2)

    def _start(self, arguments: ChildArguments) -> tuple[CoordinatorProcess, Ready]:
        child = CoordinatorProcess(arguments)
        with self._lock:
            self._child = child
            if self._closing.is_set():
                child.stop()
        try:
            return child, child.wait_ready(START_TIMEOUT)
        except BaseException:
            child.kill()
            self._wait_for_end(child)
            raise

    def _wait_for_loss(self, child: CoordinatorProcess) -> str:
        """Block until the process ends, or hangs and is killed; return which of them."""
        try:
            while child.beats(self._answer_timeout):
                pass
        except TimeoutError:
            child.kill()
            self._wait_for_end(child)
            return f"did not answer for {self._answer_timeout:g} s and was killed"
        return f"ended with code {self._wait_for_end(child)}"

    def _wait_for_end(self, child: CoordinatorProcess) -> int:
        code = child.wait()
        with self._lock:
            self._child = None
        return code

    def _restart(self, arguments: ChildArguments, delay: float) -> CoordinatorProcess | None:
        """Start again after ``delay`` seconds, and again until it succeeds; return None once the runtime is closing."""
        while not self._closing.wait(delay):
            try:
                child, ready = self._start(arguments)
            except (OmniError, OSError) as error:
                delay = min(MAX_DELAY, delay * 2)
                logger.error("The coordinator process could not be restarted: %s; next try in %.1f s", error, delay)
            else:
                logger.warning("The coordinator process serves again on %s", ready.router_address)
                return child
        return None
