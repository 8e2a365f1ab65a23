"""What becomes of requests when the server is told to end."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from vllm_omni_plugin.errors import SHUTTING_DOWN, NoReplicaError
from vllm_omni_plugin.integration.engine_client.request_failures import to_http
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall, PipelineCallEnded

_ANSWER_S = 1.0
"""Seconds that AsyncLLM may take, beyond the time for requests, for what they have put out by then."""


class GracefulShutdown:
    """Lets requests finish, and ends those that cannot, with the finish reason "abort", as vLLM's engine does.

    Those that have not begun fail with 503, which clients and balancers try elsewhere.

    Without an end, vLLM's server would wait for its open connections for ever. `wait_for_requests` and `end` are called
    from the thread that ends the fleet, all else from AsyncLLM's loop.

    Attributes:
        ending: whether new requests are refused.
    """

    def __init__(self) -> None:
        self.ending = False
        self._output_processor: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told = asyncio.Event()
        self._all_answered = threading.Event()

    @property
    def loop_in_other_thread(self) -> bool:
        """Whether AsyncLLM's loop runs, and not in this thread."""
        if self._loop is None or not self._loop.is_running():
            return False
        try:
            return asyncio.get_running_loop() is not self._loop
        except RuntimeError:
            return True

    def bind(self, output_processor: Any) -> None:
        """From now on requests are those of AsyncLLM's `OutputProcessor`."""
        self._output_processor = output_processor
        # vLLM's server makes AsyncLLM on the loop that answers; who makes it elsewhere has no answers before it asks.
        with suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()

    async def wait_until_ending(self) -> None:
        """Return once new requests are refused."""
        self._loop = asyncio.get_running_loop()
        # The end may have begun before there was a loop to tell.
        if not self.ending:
            await self._told.wait()

    def refuse(self, request_id: str, call: PipelineCall | None) -> None:
        """A new request comes too late: it fails, and the call of a pipeline with it."""
        self._abort([request_id], begun=False)
        if call is not None:
            call.put(PipelineCallEnded(NoReplicaError(SHUTTING_DOWN)))

    def outputs_processed(self) -> None:
        """AsyncLLM asks for outputs, and has handled what it was given, or a client has left."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if self.ending and self._output_processor is not None and not self._output_processor.has_unfinished_requests():
            self._all_answered.set()

    def wait_for_requests(self, finish: Callable[[float], float], timeout: float | None) -> float | None:
        """Refuse new requests, and give the others `timeout` seconds to finish. Blocks.

        Args:
            finish: waits so long until replicas have finished, and returns the seconds that are left.
            timeout: 0 or None waits for nothing.

        Returns:
            What is left of the time for engines to end.
        """
        self.ending = True
        elsewhere = self.loop_in_other_thread
        self._on_loop(self._told.set)
        if not timeout or not elsewhere:
            return timeout
        left = finish(timeout)
        if left:
            began_at = time.monotonic()
            self._on_loop(self.outputs_processed)
            self._all_answered.wait(max(left, _ANSWER_S))
            left = max(0.0, left - (time.monotonic() - began_at))
        return left

    def cancel_wait(self) -> None:
        """Wait no longer for AsyncLLM's answers."""
        self._all_answered.set()

    def abort_all(self) -> None:
        """End what has not finished."""
        self._on_loop(self._abort_all)

    def _on_loop(self, do: Any) -> None:
        # A loop that has ended has nobody to answer.
        with suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(do)

    def _abort_all(self) -> None:
        # AsyncLLM may fail before it has one, and there is nothing to end then.
        if self._output_processor is not None:
            self._abort(tuple(self._output_processor.request_states), begun=True)

    def _abort(self, request_ids: Sequence[str], *, begun: bool) -> None:
        states = [self._output_processor.request_states.get(request_id) for request_id in request_ids]
        self._output_processor.abort_requests(request_ids, internal=True)
        for state in states:
            # The answer of a pooling model has no finish reason, and would be taken for a whole one.
            if state is not None and (not begun or state.detokenizer is None):
                state.queue.put(to_http(NoReplicaError(SHUTTING_DOWN)))
