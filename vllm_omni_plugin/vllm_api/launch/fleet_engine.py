"""Marks processes as those of a fleet's engine, and reports how an engine's worker exited.

vLLM's engine core reports its death without a reason, so a worker that was killed by a signal looks like any error.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_omni_plugin.config import FLEET_ENGINE
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.vllm_api.launch.spawning import describe_exit

logger = init_logger(__name__)

_MAX_BYTES = 500
_JOIN_TIMEOUT_S = 1.0
_OTHER_MACHINES_S = 3.0
"""After an error in workers of several machines, for the first machine to notice which one is lost. Then it ends this
engine for that reason; otherwise the error is the engine's, and a request may be the cause."""


class ExitNote:
    """Text that a failing engine writes for its parent process: a memory file that belongs to the parent."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("vllm-omni-exit-note")
        weakref.finalize(self, os.close, self._fd)

    @property
    def path(self) -> Path:
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def read(self) -> str:
        return os.pread(self._fd, _MAX_BYTES, 0).decode(errors="replace")


@contextmanager
def mark_as_fleet_engine(exit_note: ExitNote) -> Iterator[None]:
    """Processes that are spawned in this context, and their descendants, have `FLEET_ENGINE` set. Hold `SPAWN_LOCK`."""
    os.environ[FLEET_ENGINE] = str(exit_note.path)
    try:
        yield
    finally:
        del os.environ[FLEET_ENGINE]


def fleet_executor(executor_class: Any) -> Any:
    """`FleetExecutor` in place of vLLM's `MultiprocExecutor`; any other class is returned as it is."""
    return FleetExecutor if executor_class is MultiprocExecutor else executor_class


class FleetExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Writes an `ExitNote` about failed workers before the engine reports its death."""

    def collective_rpc(self, *args: Any, non_block: bool = False, **kwargs: Any) -> Any:
        future = super().collective_rpc(*args, non_block=True, **kwargs)
        if self.parallel_config.nnodes > 1:
            future.get_response = partial(_delay_errors, future.get_response)
        return future if non_block else future.result()

    def shutdown(self) -> None:
        """Shut the workers down. If vLLM calls this because a worker exited, write how it exited first."""
        try:
            if getattr(self, "is_failed", False) and not getattr(self, "shutting_down", False):
                self._write_exit_note()
        except Exception:
            # The engine must exit even if it cannot write the note, or its requests would hang.
            logger.exception("The exit status of a worker of this engine could not be reported.")
        finally:
            super().shutdown()

    def wait_for_exit(self) -> None:
        """Block until a worker has exited, and write how. In a process without an engine core."""
        self._write_exit_note(None)

    def _write_exit_note(self, timeout: float | None = 0) -> None:
        """Write down which worker ended and how, for the log of the head or node."""
        processes = [worker.proc for worker in self.workers]
        exited = wait([process.sentinel for process in processes], timeout)
        reasons = []
        for process in processes:
            if process.sentinel in exited:
                # The sentinel may become readable before the exit code is available.
                process.join(_JOIN_TIMEOUT_S)
                reasons.append(f"its worker {process.name} {describe_exit(process.exitcode)}")
        note = ", ".join(reasons)
        logger.error("This engine exits, because %s.", note)
        Path(os.environ[FLEET_ENGINE]).write_text(note)


def _delay_errors(get_response: Callable[[], Any]) -> Any:
    """Report a failed step late, so that a lost machine is noticed first and named as the cause."""
    try:
        return get_response()
    except Exception:
        time.sleep(_OTHER_MACHINES_S)
        raise
