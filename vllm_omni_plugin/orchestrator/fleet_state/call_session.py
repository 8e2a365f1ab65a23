"""What a head knows of the other heads while it makes operator calls, and its messages that they answer."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from vllm_omni_plugin.coordinator import HeadLeft, HeadWork, OmniCoordClientForHead, SessionLost, Welcome
from vllm_omni_plugin.coordinator.protocol import head_messages as wire
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState
from vllm_omni_plugin.errors import CoordinatorUnavailableError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CoordinatorMessage

logger = init_logger(__name__)

FIRST_STATE_TIMEOUT_S = 5.0
"""How long a head that has just started waits for the fleet's document."""
ANSWER_TIMEOUT_S = 300.0
"""How long a caller waits for the other heads, which may have to call engines of their own node."""

MAX_CONFLICTS = 256
"""So many changes in a row may meet a change of another head. There are at most 64 heads."""

CoordinatorClient = Callable[[], OmniCoordClientForHead | None]


@dataclass(eq=False, slots=True)
class SentCall:
    """A call that the other heads have been told, and this head's work for its document.

    `taken` is done when the coordinator passes it on, with whether it has taken the document; `finished` when all other
    heads have done their part.
    """

    call_id: int
    taken: "asyncio.Future[bool]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    finished: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    work: Sequence["asyncio.Task[None]"] = ()

    def fail(self, error: CoordinatorUnavailableError) -> None:
        for future in (self.taken, self.finished):
            if not future.done():
                future.set_exception(error)
                # It may be that nobody waits for it any more.
                future.exception()


class CallSession:
    """Follows this head's session at the coordinator. Lives on the orchestrator's loop.

    `client` returns this head's client, None until it exists. Without `client` there are no other heads.
    """

    def __init__(self, head_id: str, client: CoordinatorClient | None) -> None:
        self._head_id = head_id
        self.is_alone = client is None
        self._client = client or (lambda: None)
        self._is_open = False
        self._synced = asyncio.Event()
        self._others: set[str] = set()
        self._knows_others = client is None
        if client is None:
            self._synced.set()
        self._ids = itertools.count(1)
        self._sent: dict[int, SentCall] = {}
        # Refusals since a call of this head was passed on.
        self._conflicts = 0

    @property
    def refusal(self) -> CoordinatorUnavailableError | None:
        """Why operator calls are refused now; None if they are not. Safe to read from any thread."""
        if self._is_open or (self._knows_others and not self._others):
            return None
        return CoordinatorUnavailableError(
            "The coordinator of the fleet cannot be reached, so the other servers cannot be notified. "
            "Requests are served. Please try again later."
        )

    async def wait_synced(self) -> None:
        """Wait until this head has the fleet's document, or cannot get it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_STATE_TIMEOUT_S):
                await self._synced.wait()

    def handle(self, message: CoordinatorMessage) -> None:
        """Handle a message about this session or another head."""
        match message:
            case Welcome():
                self._forget_calls()
                self._others, self._knows_others = set(message.heads), True
                self._is_open = True
                # The coordinator's document follows.
                self._synced.clear()
            case HeadWork() | wire.RelayedCall() if message.head_id != self._head_id:
                self._others.add(message.head_id)
            case HeadLeft():
                self._others.discard(message.head_id)
            case SessionLost():
                self._is_open = False
                self._synced.set()
                self._forget_calls()
            case FleetState():
                self._synced.set()
            case wire.CallFinished():
                if (sent := self._sent.get(message.call_id)) is not None and not sent.finished.done():
                    sent.finished.set_result(None)
            case wire.CallRefused():
                self._refused(message)

    def send(self, message: wire.CallMessageFromHead) -> bool:
        """Send a message. Returns False without a session."""
        client = self._client()
        return client is not None and client.send(message)

    def tell(self, call: wire.FleetCall) -> SentCall | None:
        """Tell the other heads of a call; returns None if there are none.

        Raises CoordinatorUnavailableError if there is no session, and there may be other heads.
        """
        # The coordinator keeps the document for heads that come later.
        if self.is_alone or (not self._others and (call.state is None or not self._is_open)):
            return None
        sent = SentCall(next(self._ids))
        if not self.send(replace(call, call_id=sent.call_id)):
            raise _lost()
        self._sent[sent.call_id] = sent
        return sent

    def passed_on(self, call_id: int) -> SentCall | None:
        """The coordinator has passed a call of this head on. Returns it, if somebody waits for that."""
        self._conflicts = 0
        sent = self._sent.get(call_id)
        return None if sent is None or sent.taken.done() else sent

    async def until_finished(self, sent: SentCall, name: str) -> None:
        """Wait until all other heads have done their part. Raises `CoordinatorUnavailableError` if that is unknown."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await sent.finished
        except TimeoutError:
            logger.warning(
                "Not all other heads have confirmed the call %s in %g s: see their logs.", name, ANSWER_TIMEOUT_S
            )
        finally:
            self._sent.pop(sent.call_id, None)

    def _refused(self, message: wire.CallRefused) -> None:
        """Another call was first: it is tried again, up to `MAX_CONFLICTS` times; else it fails with the reason."""
        sent = self._sent.pop(message.call_id, None)
        if sent is None or sent.taken.done():
            return
        self._conflicts += 1
        if message.is_outdated and self._conflicts < MAX_CONFLICTS:
            sent.taken.set_result(False)
        else:
            reason = message.reason or "The other servers have another state of the fleet, which this one cannot adopt."
            sent.fail(CoordinatorUnavailableError(reason))

    def _forget_calls(self) -> None:
        """Nobody answers the messages of before."""
        for sent in self._sent.values():
            sent.fail(_lost())
        self._sent.clear()


def _lost() -> CoordinatorUnavailableError:
    return CoordinatorUnavailableError(
        "The coordinator of the fleet was lost during the call, so other servers may not know of it. Please repeat it."
    )
