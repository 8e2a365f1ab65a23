"""What becomes of requests when the server is told to end."""

import asyncio
import threading
import time
from typing import Any, Protocol

_ANSWER_S = 1.0
"""Seconds that AsyncLLM may take, beyond the time for requests, for what they have put out by then."""


class Finishing(Protocol):
    """`integration.fleet.Fleet` in service."""

    def let_finish(self, timeout: float) -> float: ...


class LastRequests:
    """Lets requests finish, and ends those that cannot, with the finish reason "abort", as vLLM's engine does.

    Without an end, vLLM's server would wait for its open connections for ever. `submitted`, `answered` and what they
    look at belong to AsyncLLM's loop; the rest is called from the thread that ends the fleet.
    """

    def __init__(self) -> None:
        self._output_processor: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False
        self._all_answered = threading.Event()

    def bind(self, output_processor: Any) -> None:
        """From now on requests are those of AsyncLLM's `OutputProcessor`."""
        self._output_processor = output_processor

    def submitted(self, request_id: str) -> bool:
        """Whether a new request is to be served; if not, it has been ended."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if self._ending:
            self._output_processor.abort_requests([request_id], internal=True)
        return not self._ending

    def answered(self) -> None:
        """AsyncLLM has handled what it was given, or a client has left."""
        if self._ending and not self._output_processor.has_unfinished_requests():
            self._all_answered.set()

    def let_finish(self, fleet: Finishing, timeout: float | None) -> float | None:
        """Refuse new requests, and give the others `timeout` seconds to finish. Blocks.

        Returns:
            What is left of the time for engines to end.
        """
        self._ending = True
        if not timeout or self._loop is None or self._loop.is_closed() or self._is_here():
            return timeout
        left = fleet.let_finish(timeout)
        if left:
            began_at = time.monotonic()
            self._loop.call_soon_threadsafe(self.answered)
            self._all_answered.wait(max(left, _ANSWER_S))
            left = max(0.0, left - (time.monotonic() - began_at))
        return left

    def end(self) -> None:
        """End what has not finished."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        left = tuple(self._output_processor.request_states)
        if left:
            self._output_processor.abort_requests(left, internal=True)

    def _is_here(self) -> bool:
        """Whether this thread runs the loop, which then nothing could be waited for on."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False
