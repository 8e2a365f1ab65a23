"""A Python stage as an engine: speaks the engine-core protocol and computes on one thread."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import zmq

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.links.link import SocketReader
from vllm_omni_plugin.replicas.links.shared_memory import SharedMemory
from vllm_omni_plugin.stages.compute_queue import ComputeQueue, Session
from vllm_omni_plugin.stages.computing import Result
from vllm_omni_plugin.stages.python_stage import StageJob
from vllm_omni_plugin.stages.utility_methods import UtilityMethods
from vllm_omni_plugin.vllm_api.protocol.stage_codec import Frames, StageCodec
from vllm_omni_plugin.vllm_api.protocol.stage_protocol import (
    ABORTED,
    CONTENT_KEY,
    ERROR,
    STOP,
    Output,
    Outputs,
    SchedulerStats,
    StageRequest,
)
from vllm_omni_plugin.vllm_api.requests.rest_state import pause_mode

logger = init_logger(__name__)

Batch = list[tuple[Session, StageJob]]


class StageEngine:
    """Lives on the running event loop, which never waits for what is computed.

    Args:
        dealer: where requests come in; connected.
        outputs: where answers go, by client index; connected.
        memory: what is shared with the only client.

    Attributes:
        ended: done once `end` was called and nothing is being computed any more; failed if the thread has.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[StageJob]], list[Result]],
        executor: Executor,
        max_batch_size: int,
        dealer: "zmq.Socket[bytes]",
        outputs: "Sequence[zmq.Socket[bytes]]",
        memory: SharedMemory | None = None,
    ) -> None:
        self._compute = compute
        self._executor = executor
        self._max_batch_size = max_batch_size
        self._outputs = outputs
        self._memory = memory
        self._codec = StageCodec()
        self._queue = ComputeQueue()
        self._calls = UtilityMethods(self._abort, lambda: True, {"get_supported_tasks": lambda: ()}, "a Python stage")
        self._batch: Batch = []
        self._delayed_answers: list[tuple[int, Frames]] = []
        self._loop = asyncio.get_running_loop()
        self._ending = False
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._reader = SocketReader(dealer, self._receive)
        self._reader.resume()

    def end(self) -> None:
        """Take nothing more, and drop what waits. Idempotent."""
        self._ending = True
        self._reader.pause()
        self._end_if_idle()

    def _receive(self, frames: list[Any]) -> None:
        if self._memory is not None:
            frames = self._memory.take(frames)
        try:
            kind, payload = self._codec.decode([memoryview(frame) for frame in frames])
        except WireError as error:
            logger.warning("A message is dropped: %s", error)
            return
        if kind == "add":
            self._add(payload)
        elif kind == "abort":
            self._abort(payload, tell=False)
        else:
            self._answer(*payload)
        # Only once the burst that this message came with is read, so that what has come together is one batch.
        self._loop.call_soon(self._compute_next)

    def _add(self, request: StageRequest) -> None:
        if request.client_index not in range(len(self._outputs)):
            logger.warning("Request %s is dropped: there is no client %d.", request.request_id, request.client_index)
        elif not self._queue.add(request):
            logger.warning("Request %s came twice; the second one is dropped.", request.request_id)

    def _abort(self, request_ids: list[str] | None, tell: bool) -> None:
        dropped = self._queue.abort(self._queue.request_ids if request_ids is None else request_ids)
        if tell:
            self._send([(session, Output(session.request_id, [], finish_reason=ABORTED)) for session in dropped])

    def _answer(self, client_index: int, call_id: int, method: str, args: list[Any]) -> None:
        if client_index not in range(len(self._outputs)):
            logger.warning("A call of %s is dropped: there is no client %d.", method, client_index)
            return
        try:
            answer = self._codec.encode_result(call_id, self._calls.call(method, args), time.monotonic())
        except Exception as error:  # every error of a call goes to its caller, as in vLLM
            answer = self._codec.encode_failure(call_id, f"Call to {method} method failed: {error}", time.monotonic())
        if self._batch and pause_mode(method, tuple(args)) == "wait":
            self._delayed_answers.append((client_index, answer))
        else:
            self._put(client_index, answer)

    def _compute_next(self) -> None:
        if self._batch or self._ending or self._calls.pause_mode is not None:
            return
        self._batch = self._queue.take(self._max_batch_size)
        if self._batch:
            jobs = [job for _, job in self._batch]
            self._loop.run_in_executor(self._executor, self._compute, jobs).add_done_callback(self._computed)

    def _computed(self, computing: "asyncio.Future[list[Result]]") -> None:
        try:
            self._deliver(computing.result())
        except BaseException as error:  # otherwise these requests would never be answered
            self.ended.set_exception(error)

    def _deliver(self, results: list[Result]) -> None:
        batch, self._batch = self._batch, []
        answers = [
            (session, _output(session, result))
            for (session, _), result in zip(batch, results, strict=True)
            if self._queue.finish(session, failed=bool(result.content.error))
        ]
        self._compute_next()
        self._send(answers, SchedulerStats(len(self._batch), self._queue.waiting), batch[0][0].client_index)
        if not self._batch:
            self._send_delayed_answers()
        self._end_if_idle()

    def _send(
        self, answers: Sequence[tuple[Session, Output]], stats: SchedulerStats | None = None, asked_by: int = 0
    ) -> None:
        by_client: defaultdict[int, list[Output]] = defaultdict(list)
        for session, output in answers:
            by_client[session.client_index].append(output)
        if stats is not None and not answers:
            # All were aborted meanwhile; without this their client would count them as running until its next request.
            by_client[asked_by] = []
        for client_index, outputs in by_client.items():
            message = Outputs(outputs=outputs, scheduler_stats=stats, timestamp=time.monotonic())
            self._put(client_index, self._codec.encode(message))
            # To one client, as in vLLM.
            stats = None

    def _send_delayed_answers(self) -> None:
        for client_index, answer in self._delayed_answers:
            self._put(client_index, answer)
        self._delayed_answers.clear()

    def _put(self, client_index: int, frames: Frames) -> None:
        frames = frames if self._memory is None else self._memory.lend(frames)
        self._outputs[client_index].send_multipart(frames, copy=False)

    def _end_if_idle(self) -> None:
        if self._ending and not self._batch and not self.ended.done():
            self.ended.set_result(None)


def _output(session: Session, result: Result) -> Output:
    """The next output of a session whose counter has been advanced, unless it failed."""
    content = {CONTENT_KEY: result.content}
    if result.content.error:
        return Output(session.request_id, [], finish_reason=ERROR, kv_transfer_params=content)
    number = [session.answered - 1]
    return Output(session.request_id, number, None, None, result.tensor, STOP, kv_transfer_params=content)
