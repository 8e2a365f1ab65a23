"""Where heads' frames come in at the coordinator, and frames to them go out."""

from collections import deque
from collections.abc import Callable, Iterable

import zmq
from msgspec.structs import replace

from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import Socket
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    HeadInfo,
    HeadQuery,
    Hello,
    OperatorCall,
    ReachabilityReport,
    decode_from_head,
    encode_to_head,
    frames_to_head,
)
from vllm_omni_plugin.coordinator.server.reachability_checks import ReachabilityChecks
from vllm_omni_plugin.coordinator.state.connected_heads import ConnectedHeads, OutgoingFrame
from vllm_omni_plugin.coordinator.state.membership_table import TableFullError
from vllm_omni_plugin.errors import WireError


class HeadFrames:
    """Sends what the sessions say. For the coordinator's own thread.

    Args:
        sessions: Of all heads.
        router: The coordinator's ROUTER.
        facts: What nodes are told that ask about a stage.
        trials: Of their ports.
    """

    def __init__(
        self, sessions: ConnectedHeads, router: Socket, facts: Callable[[int], HeadInfo], trials: ReachabilityChecks
    ) -> None:
        self._sessions = sessions
        self._router = router
        self._facts = facts
        self._trials = trials

    def take(self, peer: bytes, frame: bytes, now: float) -> bool:
        """Take in a frame of a connection; return whether it may say so: most of it only in a session.

        Raises:
            WireError: It is no message of a head, or of one of another version.
            TableFullError: There is no place for another head.
        """
        message = decode_from_head(frame)
        if isinstance(message, HeadQuery):
            trying = self._trials.begin(peer, message.listening, message.nonce, now)
            self._tell_node(peer, replace(self._facts(message.stage_id), trying=trying))
            return True
        try:
            letters = self._sessions.handle(peer, message, now)
        except (TableFullError, WireError) as error:
            # Both are waited for.
            if isinstance(message, Hello | OperatorCall):
                self.send([self._sessions.refusal(peer, message, str(error))])
            raise
        self.send(letters or ())
        return letters is not None

    def tell_nodes(self, now: float) -> None:
        """Tell those whose ports were tried which of them are reached."""
        for peer, reached in self._trials.take(now):
            self._tell_node(peer, reached)

    def _tell_node(self, peer: bytes, answer: HeadInfo | ReachabilityReport) -> None:
        self.send((peer, frame) for frame in frames_to_head([encode_to_head(answer)]))

    def send(self, letters: Iterable[OutgoingFrame]) -> None:
        """Send them to those who are there and whose queues are not full."""
        pending = deque(letters)
        full: set[bytes] = set()
        while pending:
            peer, frame = pending.popleft()
            if peer in full:
                # What follows on something lost would be misread.
                continue
            try:
                self._router.send_multipart((peer, frame), zmq.NOBLOCK)
            except zmq.Again:
                full.add(peer)
                self._sessions.mark_out_of_sync(peer)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                pending += self._sessions.connection_lost(peer)
