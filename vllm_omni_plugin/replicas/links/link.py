"""A link to one engine: a pair of sockets that carry frames of vLLM's engine-core protocol."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import zmq

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.links.frames import receive_frames, send_frames
from vllm_omni_plugin.replicas.links.shared_memory import SharedMemory
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames
from vllm_omni_plugin.vllm_api.launch.spawning import remove_ipc_files

_BURST = 64
"""Messages handled before other callbacks of the loop run."""
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
"""Plain numbers: an operation on pyzmq's enums takes longer than the call."""
_MAX_UNREAD = 256
"""Messages that this process keeps of an engine while it does not read them. Further ones stay in the engine."""


class Link(ABC):
    """Sends frames to one engine, behind its ZMQ identity, and reads its frames. Used from one event loop only."""

    input_addr: str
    output_addr: str
    input_socket: "zmq.Socket[bytes]"
    output_socket: "zmq.Socket[bytes]"
    identity: bytes
    _reader: "SocketReader | None" = None

    def send(self, frames: Frames) -> None:
        """Queue one message for the engine. Never blocks: the queue is unbounded, as in vLLM.

        Raises MessageTooLargeError if the other end would not accept it, ReplicaError if the engine is not connected.
        """
        try:
            send_frames(self.input_socket, (self.identity, *frames))
        except zmq.ZMQError as error:
            raise ReplicaError(f"cannot send on {self.input_addr}: {error}") from error

    @abstractmethod
    def close(self) -> None:
        """Close both sockets and drop queued messages. Idempotent."""

    def start_reading(self, on_message: Callable[[list[Any]], None]) -> None:
        """Call `on_message` on the running loop with the frames of every message, in order."""
        self._reader = SocketReader(self.output_socket, on_message)
        self._reader.resume()

    def pause_reading(self) -> None:
        if self._reader is not None:
            self._reader.pause()

    def resume_reading(self) -> None:
        if self._reader is not None:
            self._reader.resume()

    def drain(self) -> None:
        if self._reader is not None:
            self._reader.drain()

    def _stop_reading(self) -> None:
        self.pause_reading()
        self._reader = None


class IpcLink(Link):
    """The link to a local engine, which connects to two ipc sockets that we bind.

    Requests go through a ROUTER (the engine is a DEALER with a known identity), outputs come through a PULL (the engine
    is a PUSH). The only message that the ROUTER receives is the engine's ready response.
    """

    def __init__(self, input_addr: str, output_addr: str, identity: bytes) -> None:
        self.input_addr = input_addr
        self.output_addr = output_addr
        self.identity = identity
        self._memory: SharedMemory | None = None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.input_socket = context.socket(zmq.ROUTER)
        self.output_socket = context.socket(zmq.PULL)
        try:
            for socket, address in ((self.input_socket, input_addr), (self.output_socket, output_addr)):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDHWM, 0)
                socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
                socket.bind(address)
            # Raise an error if the engine is not connected, instead of dropping the message.
            self.input_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        except BaseException:
            self.close()
            raise

    def share(self, memory: SharedMemory) -> None:
        """Pass large frames through memory that the engine has mapped too. Call before the first message."""
        self._memory = memory

    def start_reading(self, on_message: Callable[[list[Any]], None]) -> None:
        memory = self._memory
        super().start_reading(on_message if memory is None else lambda frames: on_message(memory.restore(frames)))

    def send(self, frames: Frames) -> None:
        super().send(frames if self._memory is None else self._memory.lend(frames))

    def close(self) -> None:
        self._stop_reading()
        self._memory = None
        self.input_socket.close()
        self.output_socket.close()
        remove_ipc_files(self.input_addr, self.output_addr)


class SocketReader:
    """Reads a ZMQ socket on the running event loop, in bursts, without a task or future per message.

    The descriptor of a ZMQ socket is edge-triggered: there is no further event until all messages are read
    (zmq_getsockopt(3), ZMQ_FD). So every burst that leaves messages in the socket schedules the next burst.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[Any]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._next_burst: asyncio.Handle | None = None
        self._reading = False

    def resume(self) -> None:
        """Start or continue reading. Messages that are already in the socket raise no event, so check at once."""
        if self._reading:
            return
        self._reading = True
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._schedule()

    def pause(self) -> None:
        if not self._reading:
            return
        self._reading = False
        self._loop.remove_reader(self._socket.fileno())
        if self._next_burst is not None:
            self._next_burst.cancel()
            self._next_burst = None

    def look_again(self) -> None:
        """Call after every send on the same socket: a send may consume the event of a received message."""
        if self._reading:
            self._schedule()

    def drain(self) -> None:
        """Handle every message that has arrived, paused or not."""
        while (frames := receive_frames(self._socket)) is not None:
            self._on_message(frames)

    def _readable(self) -> None:
        # Not scheduled, since that would cost another iteration of the loop per message.
        if self._next_burst is None:
            self._read_burst()

    def _schedule(self) -> None:
        if self._next_burst is None:
            self._next_burst = self._loop.call_soon(self._read_burst)

    def _read_burst(self) -> None:
        """Read up to `_BURST` messages, then let the loop do other work first."""
        self._next_burst = None
        for _ in range(_BURST):
            if not self._reading:
                return
            frames = receive_frames(self._socket)
            if frames is None:
                return
            try:
                self._on_message(frames)
            except BaseException:
                # The loop logs the error. Messages left in the socket raise no event.
                self._schedule()
                raise
            # Cheaper than the exception of a receive without a message, and most bursts have one message.
            if self._reading and not int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
                return
        self._schedule()
