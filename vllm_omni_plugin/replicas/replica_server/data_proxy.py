"""The data path of one lease: passes messages between the head's tcp and the engine's ipc sockets."""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import zmq

from vllm_omni_plugin import curve
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.other_loop import call_on
from vllm_omni_plugin.replicas.links.forwarding import QUEUE_MESSAGES, Socket, forward, forwarding_context
from vllm_omni_plugin.replicas.links.replica_ports import Listener
from vllm_omni_plugin.replicas.replica_server.server_settings import ServerSettings
from vllm_omni_plugin.vllm_api.codecs.message_filter import Rejection

logger = init_logger(__name__)

DATA_ROLE = "data"


class DataProxy:
    """Passes requests of one head to the engine and outputs of one slot to that head.

    Outputs pass in C without decoding. The head's messages are filtered, and forbidden ones are rejected. A call that
    loads an adapter, and all messages after it, wait until the adapter's files are read (`adapter_digest`).

    The proxy has its own ZMQ context. Terminating the context stops both directions at once whatever the peers do,
    drops unread outputs, and closes the head's connections: a head without a lease cannot write to the engine.

    `ports` are those for inputs and for outputs. Only `credential` is admitted. A head that does not read its outputs
    for the heartbeat timeout is disconnected, and `on_lost` called on the running loop. The engine's outputs come from
    `slot_socket`, which belongs to the proxy until `close`. `data_key` is the public CURVE key (Z85) of both ports, ""
    without encryption. `ended` is done after `close`, once the ports are free: at once, or when the files of an adapter
    have been read. Raises `zmq.ZMQError` or `OSError` if no descriptor is left.
    """

    def __init__(
        self,
        ports: Sequence[Listener],
        credential: str,
        settings: ServerSettings,
        on_lost: Callable[[], None],
        *,
        forwarder_addr: str,
        slot_socket: Socket,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.data_key, self._secret_key = "", b""
        if settings.secrets is not None:
            public, self._secret_key = zmq.curve_keypair()
            self.data_key = public.decode()
        inputs, outputs = ports
        with ExitStack() as undo:
            self._context = forwarding_context()
            undo.callback(self._context.destroy, linger=0)
            self._zap_handler = curve.ZapHandler(self._context, settings.secrets)
            undo.callback(self._zap_handler.close)
            self._zap_handler.admit(DATA_ROLE, credential)
            pull = self._serve(zmq.PULL, settings.max_message_bytes + curve.CURVE_BYTES)
            self._zap_handler.watch(pull, f"requests {inputs.address}")
            push = self._serve(zmq.PUSH, curve.HANDSHAKE_FRAME_BYTES)
            # The kernel closes a connection whose peer acknowledges nothing, or keeps its window closed, for this time.
            push.setsockopt(zmq.TCP_MAXRT, math.ceil(settings.heartbeat_timeout * 1000))
            self._zap_handler.watch(push, f"outputs {outputs.address}", partial(call_on, self._loop, on_lost))
            to_forwarder = self._context.socket(zmq.PUSH)
            to_forwarder.sndhwm = QUEUE_MESSAGES
            to_forwarder.connect(forwarder_addr)
            to_slot = self._context.socket(zmq.PUSH)
            to_slot.connect(slot_socket.get_string(zmq.LAST_ENDPOINT))
            inputs.bind(pull)
            outputs.bind(push)
            passes = self._filter(settings, to_slot)
            forward("omni-head-input", pull, to_forwarder, (pull, to_forwarder, to_slot), passes)
            self._output_thread = forward("omni-head-output", slot_socket, push, (push,))
            undo.pop_all()

    def close(self) -> None:
        """Let no further message pass; the slot's socket belongs to the caller again. Call once only.

        Takes milliseconds. The files of an adapter may be on a file system that hangs, so this does not wait for them.
        """
        self._zap_handler.close()
        threading.Thread(target=self._end, name="omni-lease-end", daemon=True).start()
        self._output_thread.join()

    def _end(self) -> None:
        self._context.term()
        # The loop is closed if the node has ended meanwhile.
        call_on(self._loop, self.ended.set_result, None)

    def _filter(self, settings: ServerSettings, to_slot: Socket) -> Callable[[Sequence[Any]], bool]:
        """The filter for `forward`. Answers to rejected calls go to `to_slot`, where the engine's answers go."""
        refused = 0

        def passes(frames: Sequence[Any]) -> bool:
            nonlocal refused
            # ZMQ limits the size of a frame, but not the number of frames.
            is_too_large = sum(map(len, frames[1:])) > settings.max_message_bytes
            rejection = Rejection("it is too large", ()) if is_too_large else settings.message_filter(frames[1:])
            if rejection is None:
                return True
            refused += 1
            if refused == 1:
                logger.warning("Rejected a message of a head; further ones are not logged: %s.", rejection.reason)
            if rejection.answer:
                with suppress(zmq.Again):
                    to_slot.send_multipart(rejection.answer, zmq.NOBLOCK)
            return False

        return passes

    def _serve(self, kind: int, max_frame_bytes: int) -> Socket:
        socket = self._context.socket(kind)
        socket.handshake_ivl = curve.HANDSHAKE_MS
        socket.sndhwm = socket.rcvhwm = QUEUE_MESSAGES
        socket.maxmsgsize = max_frame_bytes
        if self._secret_key:
            curve.require_key(socket, self._secret_key, DATA_ROLE)
        else:
            curve.require_password(socket, DATA_ROLE)
        return socket
