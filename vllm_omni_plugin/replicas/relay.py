"""The data path of one lease: what one head sends and gets, between tcp and the engine's ipc sockets."""

import asyncio
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_omni_plugin.curve import Gate, Secrets, require_key, require_password
from vllm_omni_plugin.replicas.forwarding import QUEUE_MESSAGES, Socket, forward, forwarding_context
from vllm_omni_plugin.replicas.link import SocketReader
from vllm_omni_plugin.replicas.ports import Listener

DATA_ROLE = "data"
_HANDSHAKE_MS = 5000


class Relay:
    """Passes requests of one head to the engine's hub and outputs of one slot to that head, without decoding them.

    It has a ZMQ context of its own, whose end stops everything at once whatever its peers do, drops what the head has
    not taken, and cuts the head's connections: a head whose lease is over cannot write into the engine any more.

    Args:
        inputs: port on which the head sends.
        outputs: port on which the head receives.
        hub_addr: where the engine's input takes messages.
        slot_socket: where the engine's outputs for this slot come from. Belongs to the relay until `close`.
        credential: what the head must show; nobody else is let in.
        secrets: whether links are encrypted (not None).
        stall_timeout: seconds after which a head that takes nothing of what there is for it is cut off.
        on_lost: called on the running loop, once, when the head's output connection has gone.

    Attributes:
        data_key: public CURVE key (Z85) of both ports, or "" where links are not encrypted.

    Raises:
        zmq.ZMQError: the system has no descriptors left; likewise `OSError`.
    """

    def __init__(
        self,
        inputs: Listener,
        outputs: Listener,
        hub_addr: str,
        slot_socket: Socket,
        credential: str,
        secrets: Secrets | None,
        stall_timeout: float,
        on_lost: Callable[[], None],
    ) -> None:
        self.data_key, self._secret_key = "", b""
        if secrets is not None:
            public, self._secret_key = zmq.curve_keypair()
            self.data_key = public.decode()
        with ExitStack() as undo:
            self._context = forwarding_context()
            undo.callback(self._context.destroy, linger=0)
            self._gate = Gate(self._context, secrets)
            undo.callback(self._gate.close)
            self._gate.admit(DATA_ROLE, credential)
            self._threads = self._open(undo, inputs, outputs, hub_addr, slot_socket, stall_timeout, on_lost)
            undo.pop_all()

    def _open(
        self,
        undo: ExitStack,
        inputs: Listener,
        outputs: Listener,
        hub_addr: str,
        slot_socket: Socket,
        stall_timeout: float,
        on_lost: Callable[[], None],
    ) -> tuple[threading.Thread, threading.Thread]:
        pull = self._serve(zmq.PULL)
        pull.rcvhwm = QUEUE_MESSAGES
        push = self._serve(zmq.PUSH)
        push.sndhwm = QUEUE_MESSAGES
        # The kernel closes a connection whose peer acknowledges nothing, or keeps its window shut, for so long.
        push.setsockopt(zmq.TCP_MAXRT, math.ceil(stall_timeout * 1000))
        to_hub = self._context.socket(zmq.PUSH)
        to_hub.sndhwm = QUEUE_MESSAGES
        to_hub.connect(hub_addr)
        self._connections = _Connections(push, on_lost)
        undo.callback(self._connections.close)
        inputs.bind(pull)
        outputs.bind(push)
        return (
            forward("omni-head-input", pull, to_hub, (pull, to_hub)),
            forward("omni-head-output", slot_socket, push, (push,)),
        )

    def close(self) -> None:
        """End both threads, within milliseconds; the slot's socket is the caller's again. Once only."""
        self._gate.close()
        self._connections.close()
        self._context.term()
        for thread in self._threads:
            thread.join()

    def _serve(self, kind: int) -> Socket:
        socket = self._context.socket(kind)
        socket.handshake_ivl = _HANDSHAKE_MS
        if self._secret_key:
            require_key(socket, self._secret_key, DATA_ROLE)
        else:
            require_password(socket, DATA_ROLE)
        return socket


class _Connections:
    """Notices that the one peer that may connect did, and is gone again.

    libzmq does not say whose connection ended, only which descriptor. But nobody is left when none is open that was
    accepted, and strangers are not kept for longer than a handshake may last.
    """

    def __init__(self, socket: Socket, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._open: set[int] = set()
        self._admitted = False
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = socket.get_monitor_socket(events)
        self._reader = SocketReader(self._monitor, self._take)
        self._reader.resume()

    def close(self) -> None:
        self._reader.pause()
        self._monitor.close(linger=0)

    def _take(self, frames: list[Any]) -> None:
        event = parse_monitor_message([bytes(frame) for frame in frames])
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._open.add(event["value"])
        elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._admitted = True
        else:
            self._open.discard(event["value"])
            if self._admitted and not self._open:
                self._admitted = False
                # Not from within the reading of a socket that the loss makes the owner close.
                asyncio.get_running_loop().call_soon(self._on_lost)
