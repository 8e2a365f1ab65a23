"""Reloads the admission file of a head when an operator asks for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from vllm_omni_plugin.admission import load_admission
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ReplaceAdmission
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, result_of

logger = init_logger(__name__)


class AdmissionFile:
    """Reloads the file, here and by `reload_others` in other API servers. Lives on the server's event loop."""

    def __init__(self, path: str, orchestrator: Orchestrator, reload_others: Callable[[], None]) -> None:
        self._path = path
        self._orchestrator = orchestrator
        self._reload_others = reload_others
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def reload(self) -> list[str]:
        """Reload the file, here and in the other API servers; returns the changed values, one line each.

        Waiting requests keep their places. Raises ConfigError if the file has an error (the previous config then
        stays), QueueClosedError if the server is about to end.
        """
        changes = await self._load()
        self._reload_others()
        return changes

    def on_signal(self) -> None:
        """Reload the file, and log the result. The other API servers get the same signal."""
        # The reference keeps the task from being collected.
        task = asyncio.create_task(self._load_and_log(), name="omni-admission-file")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_and_log(self) -> None:
        try:
            await self._load()
        except ConfigError as error:
            logger.error("The admission file has an error, and the previous config stays in use: %s", error)
        except QueueClosedError:
            pass

    async def _load(self) -> list[str]:
        # One load at a time, or an older file might be applied last.
        async with self._lock:
            # In a thread, because a large file takes seconds.
            config = await asyncio.to_thread(load_admission, self._path)
            reply: Future[list[str]] = Future()
            self._orchestrator.rpc_async_queue.put(ReplaceAdmission(config, reply))
            changes = await result_of(reply)
        if changes:
            logger.info("Admission uses the changed file %s: %s", self._path, "; ".join(changes))
        return changes
