"""Asking the other heads of a fleet, which may not answer."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from vllm_omni_plugin.coordinator import NoSeatError, PeerAnswer, PeerCall
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.peer_messages import VERSION, Version

logger = init_logger(__name__)

ANSWER_S = 3.0
"""Seconds that other heads have to answer."""
RETRY_S = 5.0
"""Seconds between attempts to reach those that did not answer."""


class PeerLink(Protocol):
    """The way to the other heads; `OmniCoordClientForHead` in service."""

    def call(self, method: str, arguments: Any, timeout: float) -> "Future[list[PeerAnswer]]": ...

    def answer(self, call: PeerCall, result: Any = None, error: str = "") -> None: ...


class PeerAsking:
    """Asks all other heads at once. Lives on the orchestrator's loop.

    A head that did not take something is told how far this one is until it answers; then it asks for what it missed.

    Args:
        seat: the way to them, None before there is one.
        version: how far this head is.
        delay: waits between attempts.

    Attributes:
        cut_off: whether the coordinator is silent, so that nobody is asked.
    """

    def __init__(
        self,
        seat: Callable[[], PeerLink | None],
        version: Callable[[], Version],
        delay: Callable[[float], Awaitable[None]],
    ) -> None:
        self.cut_off = False
        self._seat = seat
        self._version = version
        self._delay = delay
        self._reminding: asyncio.Task[None] | None = None

    @property
    def alone(self) -> bool:
        """Whether there is no way to other heads."""
        return self.cut_off or self._seat() is None

    async def ask(self, method: str, message: msgspec.Struct | None, timeout: float = ANSWER_S) -> list[PeerAnswer]:
        """What each of the others answers, or why it does not; nothing where there is no way to them.

        Args:
            method: see `peer_messages`.
            message: likewise.
            timeout: seconds that they have.
        """
        seat = self._seat()
        if seat is None or self.cut_off:
            return []
        try:
            return await asyncio.wrap_future(seat.call(method, msgspec.to_builtins(message), timeout))
        except NoSeatError:
            # Whoever has no seat asks for everything as soon as it has one again.
            return []
        except WireError as error:
            logger.error("Other heads cannot be told of %s: %s", method, error)
            return []

    async def tell(self, method: str, message: msgspec.Struct, timeout: float = ANSWER_S) -> list[PeerAnswer]:
        """As `ask`; who does not take it is told later that there is something to ask for."""
        answers = await self.ask(method, message, timeout)
        silent = [f"{answer.head_id} ({answer.error})" for answer in answers if answer.error]
        if silent:
            logger.warning("Other heads have not taken %s yet: %s.", method, ", ".join(silent))
            if self._reminding is None:
                self._reminding = asyncio.create_task(self._remind(), name="omni-remind")
        return answers

    def answer(self, call: PeerCall, result: Any = None, error: str = "") -> None:
        """Answer another head's call."""
        seat = self._seat()
        if seat is not None:
            seat.answer(call, result, error)

    async def close(self) -> None:
        """Stop reminding."""
        if self._reminding is not None:
            self._reminding.cancel()
            await asyncio.gather(self._reminding, return_exceptions=True)

    async def _remind(self) -> None:
        try:
            behind = True
            while behind:
                await self._delay(RETRY_S)
                answers = await self.ask(VERSION, self._version())
                behind = any(answer.error for answer in answers)
        finally:
            self._reminding = None
