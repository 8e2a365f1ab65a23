"""What makes an engine one of a fleet: a mark for its processes, and word of how one of its workers ended.

vLLM's engine core says that it is dead, and neither why nor how: a worker that was ended by a signal looks to the
outside like any other error.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_omni_plugin.config import FLEET_ENGINE
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.vllm_api.launch.spawning import exit_reason

logger = init_logger(__name__)

_MAX_BYTES = 500
_REAP_S = 1.0


class ExitNote:
    """A note that an engine may leave for the process that started it. It is in memory that ends with that process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("vllm-omni-exit-note")
        weakref.finalize(self, os.close, self._fd)

    @property
    def path(self) -> Path:
        """Where the engine writes it."""
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def read(self) -> str:
        """What the engine has left, "" so far."""
        return os.pread(self._fd, _MAX_BYTES, 0).decode(errors="replace")


@contextmanager
def mark_as_fleet_engine(exit_note: ExitNote) -> Iterator[None]:
    """Mark what is spawned meanwhile, with all its descendants, as an engine of a fleet. Hold `SPAWN_LOCK`."""
    os.environ[FLEET_ENGINE] = str(exit_note.path)
    try:
        yield
    finally:
        del os.environ[FLEET_ENGINE]


def fleet_executor(executor_class: Any) -> Any:
    """The executor to give to an engine of a fleet in place of vLLM's own; others stay as they are."""
    return FleetExecutor if executor_class is MultiprocExecutor else executor_class


class FleetExecutor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's own, which also tells how its workers ended before the engine says that it is dead."""

    def shutdown(self) -> None:
        """End the workers that are left. When vLLM calls it because one ended, that is told first."""
        try:
            if getattr(self, "is_failed", False) and not getattr(self, "shutting_down", False):
                self._tell_ends()
        except Exception:
            # An engine that could not say how it ended must end all the same, or its requests would hang.
            logger.exception("How a worker of this engine ended could not be told.")
        finally:
            super().shutdown()

    def _tell_ends(self) -> None:
        processes = [worker.proc for worker in self.workers]
        ended = wait([process.sentinel for process in processes], 0)
        ends = []
        for process in processes:
            if process.sentinel in ended:
                # The sentinel may be a moment ahead of the exit code.
                process.join(_REAP_S)
                ends.append(f"its worker {process.name} {exit_reason(process.exitcode)}")
        words = ", ".join(ends)
        logger.error("This engine ends, because %s.", words)
        Path(os.environ[FLEET_ENGINE]).write_text(words)
