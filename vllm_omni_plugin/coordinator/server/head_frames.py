"""Receives frames from heads and nodes at the coordinator's ROUTER, and sends frames to them."""

from collections import deque
from collections.abc import Callable, Iterable

import zmq

from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import Socket
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    FleetState,
    HeadInfo,
    HeadQuery,
    Hello,
    OperatorCall,
    decode_from_head,
    encode_to_head,
    frames_to_head,
)
from vllm_omni_plugin.coordinator.state.connected_heads import ConnectedHeads, OutgoingFrame
from vllm_omni_plugin.coordinator.state.membership_table import TableFullError
from vllm_omni_plugin.errors import WireError

# After the largest number of calls there would be none for the next one, and all heads would keep that number. Numbers
# below the time since the epoch, counted this fast, leave enough for ever.
_MOST_CALLS_PER_SECOND = 1_000_000


class HeadFrames:
    """Connects the ROUTER with `ConnectedHeads`. For the coordinator's thread only.

    ``head_info`` returns the answer to a query, and ``wall_clock`` the seconds since the epoch.
    """

    def __init__(
        self,
        heads: ConnectedHeads,
        router: Socket,
        head_info: Callable[[HeadQuery], HeadInfo],
        wall_clock: Callable[[], float],
    ) -> None:
        self._heads = heads
        self._router = router
        self._head_info = head_info
        self._wall_clock = wall_clock

    def receive(self, peer: bytes, frame: bytes, now: float) -> bool:
        """Handle a frame. Returns False if it needs a session and there is none. Raises as `ConnectedHeads.handle`."""
        message = decode_from_head(frame)
        if isinstance(message, HeadQuery):
            answer = encode_to_head(self._head_info(message))
            self.send((peer, frame) for frame in frames_to_head([answer]))
            return True
        if isinstance(message, FleetState) and message.number > self._wall_clock() * _MOST_CALLS_PER_SECOND:
            raise WireError(f"fleet_state: no fleet can have made {message.number} calls")
        try:
            frames = self._heads.handle(peer, message, now)
        except (TableFullError, WireError) as error:
            # Their senders wait for an answer.
            if isinstance(message, Hello | OperatorCall):
                self.send([self._heads.refusal(peer, message, str(error))])
            raise
        self.send(frames or ())
        return frames is not None

    def send(self, frames: Iterable[OutgoingFrame]) -> None:
        """Send frames. A head whose queue is full gets a resync later; a head that is gone is removed."""
        pending = deque(frames)
        full: set[bytes] = set()
        while pending:
            peer, frame = pending.popleft()
            if peer in full:
                # Frames after a lost one are of no use.
                continue
            try:
                self._router.send_multipart((peer, frame), zmq.NOBLOCK)
            except zmq.Again:
                full.add(peer)
                self._heads.mark_out_of_sync(peer)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                pending += self._heads.connection_lost(peer)
