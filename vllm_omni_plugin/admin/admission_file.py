"""The admission file of a head, read again when an operator says so."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from vllm_omni_plugin.admin.replies import result_of
from vllm_omni_plugin.admission import load_admission
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ReplaceAdmission
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError

logger = init_logger(__name__)


class AdmissionFile:
    """Reads the file and has the orchestrator go by it. Lives on the server's event loop.

    Args:
        path: the file.
        orchestrator: goes by it.
        tell_others: makes the other API servers of this command read it, too.
    """

    def __init__(self, path: str, orchestrator: Orchestrator, tell_others: Callable[[], None]) -> None:
        self._path = path
        self._orchestrator = orchestrator
        self._tell_others = tell_others
        self._reading = asyncio.Lock()
        self._asked: set[asyncio.Task[None]] = set()

    async def reload(self) -> list[str]:
        """Read the file again; requests that wait keep their places.

        Returns:
            What has changed, a line for each value.

        Raises:
            ConfigError: what is wrong with the file. What was read before stays in force.
            QueueClosedError: the server is about to end.
        """
        changes = await self._read()
        self._tell_others()
        return changes

    def on_signal(self) -> None:
        """Read the file again, and say in the log what came of it. The others have had the signal, too."""
        # Kept, or it would be collected.
        task = asyncio.create_task(self._read_and_say(), name="omni-admission-file")
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def _read_and_say(self) -> None:
        try:
            await self._read()
        except ConfigError as error:
            logger.error("The admission file is not usable, and what was read before stays in force: %s", error)
        except QueueClosedError:
            pass

    async def _read(self) -> list[str]:
        # One after the other, or an older file might be the last one.
        async with self._reading:
            # In a thread: a large file takes seconds.
            plan = await asyncio.to_thread(load_admission, self._path)
            reply: Future[list[str]] = Future()
            self._orchestrator.rpc_async_queue.force_put(ReplaceAdmission(plan, reply))
            changes = await result_of(reply)
        if changes:
            logger.info("Admission goes by the new %s: %s", self._path, "; ".join(changes))
        return changes
