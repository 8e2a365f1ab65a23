"""A replica server and its engine on the test's loop: real sockets, controlled by the test."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from tests.fakes.engine_api import DEAD_FRAME, FakeEngineApi, FakeOutput, FakeOutputs, FakeResult, FakeUtilityOutput
from vllm_omni_plugin.coordinator import ReplicaInfo, ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD
from vllm_omni_plugin.curve import Secrets, ZapHandler, require_key, require_password, secure_server
from vllm_omni_plugin.replicas.control.lease_messages import (
    Attach,
    Attached,
    AttachRefused,
    Expired,
    FromServer,
    RenewLease,
    Status,
    ToServer,
    decode_to_server,
    encode,
)
from vllm_omni_plugin.replicas.links.link import SocketReader
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames

IDENTITY = b"\x03\x00"
CLIENT_INDEX = 2
LEASE = 17
_DATA = "data"


class FakeEvent(msgspec.Struct):
    """An `EngineCoreEvent`."""

    timestamp: float


class TimedOutput(FakeOutput):
    """A `FakeOutput` that may carry events."""

    events: list[FakeEvent] | None = None


class TimedOutputs(FakeOutputs):
    """A `FakeOutputs` with the sender's time."""

    outputs: list[TimedOutput] = msgspec.field(default_factory=list)  # type: ignore[assignment]
    timestamp: float = 0.0


class RemoteApi(FakeEngineApi):
    """A `FakeEngineApi` whose messages show the client index and whose outputs have times."""

    def encode_add(self, request: Any, engine_request_id: str, client_index: int = 0) -> Frames:
        return (*super().encode_add(request, engine_request_id), b"%d" % client_index)

    def encode_utility(self, call_id: int, method: str, args: tuple[Any, ...], client_index: int = 0) -> Frames:
        return (*super().encode_utility(call_id, method, args), b"%d" % client_index)

    outputs_type = TimedOutputs


class FakeServer:
    """Serves one replica to one head.

    Attributes:
        info: the replica as a coordinator lists it.
        control_messages: the head's control messages, in order.
        received: the frames that reached the engine, in order.
        refusal: answer to an `Attach` instead of a lease.
        answers_renewals, answers_calls: whether the server and its engine answer.
        admits: whether the data sockets admit the head.
    """

    def __init__(self, secrets: Secrets | None = None) -> None:
        self.control_messages: list[ToServer] = []
        self.received: list[list[bytes]] = []
        self.refusal: AttachRefused | None = None
        self.answers_attach = self.answers_renewals = self.answers_calls = self.admits = True
        self.told = NOTHING_TOLD
        self.status = ReplicaStatus.UP
        self._encrypted = secrets is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.zap_handler = ZapHandler(self._context, secrets)
        self.zap_handler.admit_secret_holders("replica")
        self._data_key, self._data_secret = zmq.curve_keypair()
        self._head = b""
        self.incarnation = 0
        self._control = self._bind(zmq.ROUTER, lambda socket: secure_server(socket, secrets, "replica"))
        self._input = self._bind(zmq.PULL, self._guard)
        self._output = self._bind(zmq.PUSH, self._guard)
        control_addr, input_addr, output_addr = map(_address, (self._control, self._input, self._output))
        self.info = ReplicaInfo(
            input_addr=input_addr,
            output_addr=output_addr,
            stage_id=0,
            status=ReplicaStatus.UP,
            queue_length=0,
            last_heartbeat=0.0,
            registered_at=0.0,
            incarnation=1,
            control_addr=control_addr,
        )
        self._readers = [SocketReader(self._control, self._on_control), SocketReader(self._input, self._on_input)]
        for reader in self._readers:
            reader.resume()

    def has_received(self, kind: type) -> bool:
        return any(isinstance(message, kind) for message in self.control_messages)

    def send_control(self, message: FromServer) -> None:
        self._control.send_multipart([self._head, encode(message)])

    def send_frames(self, *frames: bytes) -> None:
        self._control.send_multipart([self._head, *frames])

    def send_outputs(self, outputs: TimedOutputs) -> None:
        self._output.send(msgspec.json.encode(outputs))

    def report_death(self) -> None:
        self._output.send(DEAD_FRAME)

    def cut(self) -> None:
        self._readers[1].pause()
        self._input.close(linger=0)
        self._output.close(linger=0)

    def close(self) -> None:
        for reader in self._readers:
            reader.pause()
        for socket in (self._control, self._input, self._output):
            socket.close(linger=0)
        self.zap_handler.close()
        self._context.term()

    def _bind(self, kind: int, guard: Callable[["zmq.Socket[bytes]"], None]) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        guard(socket)
        socket.bind("tcp://127.0.0.1:*")
        return socket

    def _guard(self, socket: "zmq.Socket[bytes]") -> None:
        if self._encrypted:
            require_key(socket, self._data_secret, _DATA)
        else:
            require_password(socket, _DATA)

    def _on_control(self, frames: Sequence[Any]) -> None:
        self._head = bytes(frames[0])
        message = decode_to_server(bytes(frames[1]))
        self.control_messages.append(message)
        if isinstance(message, Attach) and self.answers_attach:
            self._answer(message)
        elif isinstance(message, RenewLease) and self.answers_renewals:
            lease_known = message.lease == LEASE
            self.send_control(Status(LEASE, self.status) if lease_known else Expired(message.lease))

    def _answer(self, attach: Attach) -> None:
        if self.refusal is not None:
            self.send_control(self.refusal)
            return
        if self.admits:
            self.zap_handler.admit(_DATA, attach.credential)
        self.send_control(
            Attached(
                lease=LEASE,
                input_addr=self.info.input_addr,
                output_addr=self.info.output_addr,
                client_index=CLIENT_INDEX,
                identity=IDENTITY,
                ready_response=b"ready",
                max_message_bytes=2**20,
                data_key=self._data_key.decode() if self._encrypted else "",
                fingerprint={},
                told=self.told,
                incarnation=self.incarnation,
            )
        )

    def _on_input(self, frames: Sequence[Any]) -> None:
        message = [bytes(frame) for frame in frames]
        self.received.append(message)
        if message[1] == b"utility" and self.answers_calls:
            call_id, method, _ = msgspec.json.decode(message[2])
            self.send_outputs(TimedOutputs(utility_output=FakeUtilityOutput(call_id, None, FakeResult(method))))


def _address(socket: "zmq.Socket[bytes]") -> str:
    return socket.get_string(zmq.LAST_ENDPOINT)
