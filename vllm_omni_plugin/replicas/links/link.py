"""A link to one replica: a pair of addresses that speak the engine-core protocol, as frames in and frames out."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.links.shared_memory import SharedMemory
from vllm_omni_plugin.vllm_api.launch.spawning import remove_ipc_files

Frames = Sequence[Any]

_BURST = 64
"""Messages handled before other work of the loop gets its turn."""


class Link(ABC):
    """The two directions of one engine: frames to it, frames of it. Used from one event loop only.

    Attributes:
        input_addr: where messages to the engine go.
        output_addr: where its messages come from.
        input_socket: what they are sent on.
        output_socket: what is read, from `start_reading` on.
        identity: the engine's ZMQ identity, the routing frame of every message to it.
    """

    input_addr: str
    output_addr: str
    input_socket: "zmq.Socket[bytes]"
    output_socket: "zmq.Socket[bytes]"
    identity: bytes
    _reader: "SocketReader | None" = None

    def send(self, frames: Frames) -> None:
        """Queue one message for the engine. Never blocks: the queue is unbounded, as vLLM's own is.

        Raises:
            MessageTooLargeError: the other end would end the connection over it. It was not sent.
            ReplicaError: the engine is not connected, or the connection is broken.
        """
        try:
            self.input_socket.send_multipart((self.identity, *frames), zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            raise ReplicaError(f"cannot send on {self.input_addr}: {error}") from error

    @abstractmethod
    def close(self) -> None:
        """Close both directions at once and drop what is queued. Idempotent."""

    def start_reading(self, on_message: Callable[[list[Any]], None]) -> None:
        """Call `on_message(frames)` on the running loop for every message of the engine, in order."""
        self._reader = SocketReader(self.output_socket, on_message)
        self._reader.resume()

    def pause_reading(self) -> None:
        """Leave messages in the socket until `resume_reading`."""
        if self._reader is not None:
            self._reader.pause()

    def resume_reading(self) -> None:
        """Undo `pause_reading`, starting with what has piled up."""
        if self._reader is not None:
            self._reader.resume()

    def drain(self) -> None:
        """Handle at once every message that has arrived."""
        if self._reader is not None:
            self._reader.drain()

    def _stop_reading(self) -> None:
        """Read no more, before the socket is closed. Idempotent."""
        self.pause_reading()
        self._reader = None


class IpcLink(Link):
    """The link to an engine on this node, which connects to the two sockets we bind.

    Args:
        input_addr: ipc address to bind for requests (ROUTER; the engine is a DEALER with a known identity).
        output_addr: ipc address to bind for outputs (PULL; the engine is a PUSH).
        identity: see `Link`.

    Attributes:
        input_socket: the ROUTER, on which the one message that comes is the engine's ready response.
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
                socket.setsockopt(zmq.RCVHWM, 0)
                socket.bind(address)
            # An unknown peer is an error to raise, not a message to drop: it means that the engine never connected.
            self.input_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        except BaseException:
            self.close()
            raise

    def share(self, memory: SharedMemory) -> None:
        """Let large frames go through memory that the engine has the other end of. Before anything is sent or read."""
        self._memory = memory

    def start_reading(self, on_message: Callable[[list[Any]], None]) -> None:
        memory = self._memory
        super().start_reading(on_message if memory is None else lambda frames: on_message(memory.take(frames)))

    def send(self, frames: Frames) -> None:
        super().send(frames if self._memory is None else self._memory.lend(frames))

    def close(self) -> None:
        self._stop_reading()
        self._memory = None
        self.input_socket.close()
        self.output_socket.close()
        remove_ipc_files(self.input_addr, self.output_addr)


class SocketReader:
    """Reads a ZMQ socket on the running event loop, a burst per wake-up and without a task or future per message.

    The descriptor of a ZMQ socket is edge-triggered: one event may stand for many messages, and none follows until they
    have been taken (zmq_getsockopt(3), ZMQ_FD). So every burst that ends with messages left schedules the next.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[Any]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._next_burst: asyncio.Handle | None = None
        self._reading = False

    def resume(self) -> None:
        """Start or go on reading. What is already in the socket raises no event, so look at once."""
        if self._reading:
            return
        self._reading = True
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._schedule()

    def pause(self) -> None:
        """Stop reading; idempotent."""
        if not self._reading:
            return
        self._reading = False
        self._loop.remove_reader(self._socket.fileno())
        if self._next_burst is not None:
            self._next_burst.cancel()
            self._next_burst = None

    def look_again(self) -> None:
        """Call after every send on the socket that is read: a send may take in the event of a message that has come."""
        if self._reading:
            self._schedule()

    def drain(self) -> None:
        """Handle every message that has arrived, paused or not."""
        while (frames := self._receive()) is not None:
            self._on_message(frames)

    def _readable(self) -> None:
        # At once, since another turn of the loop for every message would be dear.
        if self._next_burst is None:
            self._read_burst()

    def _schedule(self) -> None:
        if self._next_burst is None:
            self._next_burst = self._loop.call_soon(self._read_burst)

    def _read_burst(self) -> None:
        self._next_burst = None
        for _ in range(_BURST):
            if not self._reading:
                return
            frames = self._receive()
            if frames is None:
                return
            try:
                self._on_message(frames)
            except BaseException:
                # The loop reports it; what is left in the socket raises no event.
                self._schedule()
                raise
            # Cheaper than the exception of a receive in vain, and most bursts have one message.
            if self._reading and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
        self._schedule()

    def _receive(self) -> list[Any] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
