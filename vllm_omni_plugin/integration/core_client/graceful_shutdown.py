"""Finishes and ends requests when the server shuts down."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from vllm_omni_plugin.errors import SHUTTING_DOWN, NoReplicaError
from vllm_omni_plugin.integration.core_client.request_failures import to_http
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall, PipelineCallEnded
from vllm_omni_plugin.other_loop import call_on

_ANSWER_S = 1.0
"""Seconds at least that AsyncLLM has to process the last outputs, even if less of the time for requests is left."""


class GracefulShutdown:
    """Lets requests finish. Aborts those that do not finish in time, with the finish reason "abort" as vLLM does.

    New requests fail with 503 once it is `ending`. `wait_for_requests`, `cancel_wait` and `abort_all` are called in the
    thread that shuts the fleet down (`FleetClient.shutdown` has the order), everything else on AsyncLLM's loop.
    """

    def __init__(self) -> None:
        self.ending = False
        self._output_processor: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending_event = asyncio.Event()
        self._all_processed = threading.Event()

    @property
    def loop_in_other_thread(self) -> bool:
        if self._loop is None or not self._loop.is_running():
            return False
        try:
            return asyncio.get_running_loop() is not self._loop
        except RuntimeError:
            return True

    def bind(self, output_processor: Any) -> None:
        self._output_processor = output_processor
        # vLLM's server creates AsyncLLM on its loop. Elsewhere, the loop is known once it asks for outputs.
        with suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()

    async def wait_until_ending(self) -> None:
        self._loop = asyncio.get_running_loop()
        # If the shutdown began before `_loop` was set, the event was not set.
        if not self.ending:
            await self._ending_event.wait()

    def refuse(self, request_id: str, call: PipelineCall | None) -> None:
        """End a request that came after the shutdown had begun."""
        self._abort([request_id], started=False)
        if call is not None:
            call.put(PipelineCallEnded(NoReplicaError(SHUTTING_DOWN)))

    def outputs_processed(self) -> None:
        """Called when AsyncLLM has processed all outputs so far, or a client has disconnected."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if self.ending and self._output_processor is not None and not self._output_processor.has_unfinished_requests():
            self._all_processed.set()

    def wait_for_requests(self, finish: Callable[[float], float], timeout: float | None) -> float | None:
        """Refuse new requests, and give the others `timeout` seconds, if any, to finish. Returns the seconds left.

        Blocks. `finish` waits that long until replicas have finished, and returns the seconds left.
        """
        self.ending = True
        loop_in_other_thread = self.loop_in_other_thread
        call_on(self._loop, self._ending_event.set)
        if not timeout or not loop_in_other_thread:
            return timeout
        left = finish(timeout)
        if left:
            began_at = time.monotonic()
            call_on(self._loop, self.outputs_processed)
            self._all_processed.wait(max(left, _ANSWER_S))
            left = max(0.0, left - (time.monotonic() - began_at))
        return left

    def cancel_wait(self) -> None:
        self._all_processed.set()

    def abort_all(self) -> None:
        """Abort all requests. Otherwise vLLM's server would wait for their connections forever."""
        call_on(self._loop, self._abort_all)

    def _abort_all(self) -> None:
        # AsyncLLM's construction may have failed before `bind`.
        if self._output_processor is not None:
            self._abort(tuple(self._output_processor.request_states), started=True)

    def _abort(self, request_ids: Sequence[str], *, started: bool) -> None:
        states = [self._output_processor.request_states.get(request_id) for request_id in request_ids]
        self._output_processor.abort_requests(request_ids, internal=True)
        for state in states:
            # The response of a pooling model has no finish reason, so it needs an error.
            if state is not None and (not started or state.detokenizer is None):
                state.queue.put(to_http(NoReplicaError(SHUTTING_DOWN)))
