"""Receives frames from heads and nodes at the coordinator's ROUTER, and sends frames to them."""

from collections import deque
from collections.abc import Callable, Iterable

import zmq

from vllm_omni_plugin.coordinator.protocol import head_messages as wire
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import Socket
from vllm_omni_plugin.coordinator.state.connected_heads import ConnectedHeads, OutgoingFrame
from vllm_omni_plugin.coordinator.state.membership_table import TableFullError
from vllm_omni_plugin.errors import WireError


class HeadFrames:
    """Connects the ROUTER with `ConnectedHeads`. For the coordinator's thread. ``head_info`` answers a query."""

    def __init__(
        self, heads: ConnectedHeads, router: Socket, head_info: Callable[[wire.HeadQuery], wire.HeadInfo]
    ) -> None:
        self._heads = heads
        self._router = router
        self._head_info = head_info

    def receive(self, peer: bytes, frame: bytes, now: float) -> bool:
        """Handle a frame. Returns False if it needs a session and there is none. Raises as `ConnectedHeads.handle`."""
        message = wire.decode_from_head(frame)
        if isinstance(message, wire.HeadQuery):
            answer = wire.encode_to_head(self._head_info(message))
            self.send((peer, frame) for frame in wire.frames_to_head([answer]))
            return True
        try:
            frames = self._heads.handle(peer, message, now)
        except (TableFullError, WireError) as error:
            # Their senders wait for an answer.
            if isinstance(message, wire.Hello | wire.FleetCall):
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
