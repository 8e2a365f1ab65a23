"""Where heads' frames come in at the coordinator, and letters to them go out."""

from collections import deque
from collections.abc import Iterable

import zmq

from vllm_omni_plugin.coordinator.editions import ListEditions
from vllm_omni_plugin.coordinator.head_messages import Answer, Beat, Bye, Call, FromHead, Numbers, Work
from vllm_omni_plugin.coordinator.head_table import HeadTable, Letter
from vllm_omni_plugin.coordinator.head_wire import decode_from_head
from vllm_omni_plugin.coordinator.membership import TableFullError
from vllm_omni_plugin.coordinator.sockets import Socket
from vllm_omni_plugin.errors import WireError


class HeadDesk:
    """Sends what the table of heads says. For the coordinator's own thread.

    Args:
        heads: The table.
        editions: The list that they are told.
        router: The coordinator's ROUTER.
    """

    def __init__(self, heads: HeadTable, editions: ListEditions, router: Socket) -> None:
        self._heads = heads
        self._editions = editions
        self._router = router

    def take(self, peer: bytes, frame: bytes, now: float) -> bool:
        """Take in a frame of a connection; return whether it had a meaning, or came too late to have one.

        Raises:
            WireError: It is no message of a head, or of one of another version.
            TableFullError: There is no seat for another head.
        """
        letters = self._answer(peer, decode_from_head(frame), now)
        if letters is None:
            return False
        self.send(letters)
        return True

    def send(self, letters: Iterable[Letter]) -> None:
        """Send them to those who are there. A head whose queue is full finds out by the numbers of its deliveries."""
        pending = deque(letters)
        while pending:
            letter = pending.popleft()
            try:
                self._router.send_multipart(letter, zmq.NOBLOCK)
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                pending += self._heads.leave(letter[0]) or []

    def _answer(self, peer: bytes, message: FromHead, now: float) -> list[Letter] | None:
        match message:
            case Beat():
                return self._beat(peer, message, now)
            case Work():
                return self._heads.work(peer, message)
            case Call():
                return self._heads.call(peer, message)
            case Answer():
                return self._heads.answer(peer, message)
            case Bye():
                return self._heads.leave(peer)
            case Numbers():
                if not self._heads.has_seat(peer):
                    return None
                self._editions.reserve(message)
                return []

    def _beat(self, peer: bytes, beat: Beat, now: float) -> list[Letter] | None:
        try:
            return self._heads.beat(peer, beat, now)
        except (TableFullError, WireError) as error:
            self.send([self._heads.refusal(peer, str(error))])
            raise
