"""A Python stage as an engine: speaks the engine-core protocol and computes on one thread."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.links.shared_memory import SharedMemory
from vllm_omni_plugin.stages.compute_queue import ComputeQueue, StageSession
from vllm_omni_plugin.stages.python_stage import StageJob
from vllm_omni_plugin.stages.socket_engine import SocketEngine
from vllm_omni_plugin.stages.stage_runner import StageResult
from vllm_omni_plugin.vllm_api.codecs import stage_protocol
from vllm_omni_plugin.vllm_api.codecs.stage_codec import StageCodec
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames

logger = init_logger(__name__)

Batch = list[tuple[StageSession, StageJob]]


class StageEngine(SocketEngine):
    """A Python stage behind the engine-core protocol.

    `compute` runs on the executor, which has one thread. `memory` is shared with the only client. `ended` is done after
    `end` once the last batch is computed; it has an exception if the thread or a message failed.
    """

    kind = "a Python stage"

    def __init__(
        self,
        compute: Callable[[Sequence[StageJob]], list[StageResult]],
        executor: Executor,
        max_batch_size: int,
        memory: SharedMemory | None = None,
    ) -> None:
        super().__init__(StageCodec())
        self._compute = compute
        self._executor = executor
        self._max_batch_size = max_batch_size
        self._memory = memory
        self._queue = ComputeQueue()
        self._batch: Batch = []
        self._ending = False
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def end(self) -> None:
        """Stop reading, and drop the requests that wait. Idempotent."""
        self._ending = True
        self._stop_reading()
        self._end_if_idle()

    @property
    def _computing(self) -> bool:
        return bool(self._batch)

    def _receive(self, frames: list[Any]) -> None:
        super()._receive(frames if self._memory is None else self._memory.restore(frames))

    def _put(self, client_index: int, frames: Frames) -> None:
        super()._put(client_index, frames if self._memory is None else self._memory.lend(frames))

    def _handle_invalid_message(self, error: WireError) -> None:
        logger.warning("An invalid message was dropped: %s", error)

    def _fail(self, error: BaseException) -> None:
        """End the process; heads are told first, so that they count it as a crash."""
        if not self.ended.done():
            for client_index in range(len(self._outputs)):
                self._put(client_index, [stage_protocol.ENGINE_DEAD])
            if not isinstance(error, Exception):
                # As it is, `sys.exit()` would look like an end on request, and say nothing.
                error = RuntimeError(f"its code ended the process: {error!r}")
            self.ended.set_exception(error)

    def _add(self, request: stage_protocol.StageRequest) -> None:
        if not self._queue.add(request):
            logger.warning("Request id %s is a duplicate; the second request was dropped.", request.request_id)

    def _abort(self, request_ids: Iterable[str] | None, notify: bool) -> None:
        dropped = self._queue.abort(self._queue.request_ids if request_ids is None else request_ids)
        if notify:
            outputs = [
                stage_protocol.WireOutput(session.request_id, [], finish_reason=stage_protocol.ABORTED)
                for session in dropped
            ]
            self._send([(session.client_index, output) for session, output in zip(dropped, outputs, strict=True)])

    def _clear_cache(self) -> bool:
        return True

    def _after_message(self) -> None:
        # After the reader has read the whole burst of messages, so that its requests form one batch.
        self._loop.call_soon(self._compute_next)

    def _compute_next(self) -> None:
        """Compute the next batch, unless one is computed, or the engine is paused or ends."""
        if self._batch or self._ending or self._pause_state.pause_mode is not None:
            return
        self._batch = self._queue.take(self._max_batch_size)
        if self._batch:
            jobs = [job for _, job in self._batch]
            self._loop.run_in_executor(self._executor, self._compute, jobs).add_done_callback(self._computed)

    def _computed(self, computing: "asyncio.Future[list[StageResult]]") -> None:
        try:
            self._deliver(computing.result())
        except BaseException as error:
            self._fail(error)

    def _deliver(self, results: list[StageResult]) -> None:
        batch, self._batch = self._batch, []
        answers = [
            (session.client_index, _output(session, result))
            for (session, _), result in zip(batch, results, strict=True)
            if self._queue.finish(session, failed=bool(result.content.error))
        ]
        self._compute_next()
        # Sent also if all requests were aborted: the client would count them as running until its next request.
        self._send(
            answers, stage_protocol.SchedulerStats(len(self._batch), self._queue.waiting), batch[0][0].client_index
        )
        self._send_delayed_answers()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._ending and not self._batch and not self.ended.done():
            self.ended.set_result(None)


def _output(session: StageSession, result: StageResult) -> stage_protocol.WireOutput:
    """The next output of a session, after `finish` has counted it, or its error."""
    content = {stage_protocol.CONTENT_KEY: result.content}
    if result.content.error:
        return stage_protocol.WireOutput(
            session.request_id, [], finish_reason=stage_protocol.ERROR, kv_transfer_params=content
        )
    number = [session.answered - 1]
    return stage_protocol.WireOutput(
        session.request_id, number, None, None, result.tensor, stage_protocol.STOP, kv_transfer_params=content
    )
