"""Sends and receives messages of several frames, without waiting.

By the methods of pyzmq's compiled base class: `zmq.Socket` wraps each of them in Python that checks every frame, which
took a third of the time of a message.
"""

import zmq
from zmq.backend import Socket as _CompiledSocket

from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames

_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_send, _receive = _CompiledSocket.send, _CompiledSocket.recv


def send_frames(socket: "zmq.Socket[bytes]", frames: Frames) -> None:
    """Queue a message in a socket. Large frames are not copied: their memory must not change.

    All frames must be bytes-like: an error after the first frame would make the next message a part of this one.

    Raises:
        zmq.Again: the queue is full.
        zmq.ZMQError: as `zmq.Socket.send`.
    """
    last = len(frames) - 1
    for place in range(last):
        _send(socket, frames[place], _MORE, False, False)
    _send(socket, frames[last], _LAST, False, False)


def receive_frames(socket: "zmq.Socket[bytes]") -> "list[zmq.Frame] | None":
    """The next message of a socket, which is not copied; None if there is none. Raises as `zmq.Socket.recv`."""
    try:
        frame = _receive(socket, _LAST, False, False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:
        frame = _receive(socket, _LAST, False, False)
        frames.append(frame)
    return frames
