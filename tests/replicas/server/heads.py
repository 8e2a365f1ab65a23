"""Heads that attach to a replica server, played by the test over real sockets."""

import asyncio
import itertools
import secrets as random_words
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from tests.fakes.conditions import repeated
from tests.fakes.engine_api import FakeOutputs
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.curve import PLAIN_USERNAME, Secrets, secure_client
from vllm_omni_plugin.replicas.control.lease_messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    AttachRefused,
    Detach,
    DrainReplica,
    FromServer,
    RenewLease,
    Status,
    ToServer,
    decode_from_server,
    encode,
)

_T = TypeVar("_T")
_numbers = itertools.count()


class Head:
    """One head process with its last lease. Use it as an asynchronous context manager."""

    attached: Attached

    def __init__(self, control_addr: str, fingerprint: dict[str, str], secrets: Secrets | None = None) -> None:
        self.head_id = f"head-{next(_numbers)}"
        self._fingerprint = fingerprint
        self._secrets = secrets
        self._context = zmq.asyncio.Context()
        self._control = self._context.socket(zmq.DEALER)
        secure_client(self._control, secrets, "replica")
        self._control.connect(control_addr)
        self._data_sockets: list[Any] = []
        self._renew_credential()

    async def __aenter__(self) -> "Head":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    async def try_attach(self, means: int, **other: Any) -> Attached | AttachRefused:
        """One attempt; `other` overrides fields of `Attach`."""
        said: dict[str, Any] = {
            "protocol": PROTOCOL_VERSION,
            "incarnation": means,
            "head_id": self.head_id,
            "credential": self.credential,
            "fingerprint": self._fingerprint,
        }
        await self.send_control(Attach(**(said | other)))
        answer = await self.next_message()
        while not isinstance(answer, Attached | AttachRefused):
            answer = await self.next_message()
        return answer

    async def attach(self, incarnation: int, slot: int | None = None) -> Attached:
        """Attach, on this slot if one is given, and connect the data sockets. Retries refusals that are not lasting."""
        for socket in self._data_sockets:
            socket.close(linger=0)
        # Old sockets may reconnect and would receive messages for the new ones.
        self._renew_credential()

        async def attached() -> Attached | None:
            answer = await self.try_attach(incarnation)
            if isinstance(answer, Attached):
                return answer if slot in (None, answer.client_index) else None
            assert not answer.lasting, answer
            return None

        self.attached = answer = await repeated(attached, "a lease")
        self.inputs, self.outputs = await self.connect(answer, self.credential)
        return answer

    async def connect(self, attached: Attached, credential: str, **options: int) -> tuple[Any, Any]:
        """Connect data sockets with this credential and these ZMQ options."""
        inputs, outputs = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, address in ((inputs, attached.input_addr), (outputs, attached.output_addr)):
            if attached.data_key:
                socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
                socket.curve_serverkey = attached.data_key.encode()
            else:
                socket.plain_username, socket.plain_password = PLAIN_USERNAME.encode(), credential.encode()
            for name, value in options.items():
                setattr(socket, name, value)
            socket.connect(address)
        self._data_sockets += [inputs, outputs]
        return inputs, outputs

    def _renew_credential(self) -> None:
        self._public, self._secret = zmq.curve_keypair()
        self.credential = self._public.decode() if self._secrets else random_words.token_hex(20)

    async def send_control(self, message: ToServer) -> None:
        await self._control.send(encode(message))

    async def send_frames(self, frames: list[bytes]) -> None:
        await self._control.send_multipart(frames)

    async def next_message(self) -> FromServer:
        return decode_from_server(await within(self._control.recv()))

    async def next_status(self) -> Status:
        status = await self.next_message()
        assert isinstance(status, Status), status
        return status

    async def renew(self, busy: bool = False) -> FromServer:
        await self.send_control(RenewLease(self.attached.lease, busy))
        return await self.next_message()

    async def renew_while_up(self) -> Status:
        """Renew the lease until its answer says that the replica is not up any more."""

        async def not_up() -> Status | None:
            answer = await self.renew()
            assert isinstance(answer, Status)
            return None if answer.status is ReplicaStatus.UP else answer

        return await repeated(not_up, "a replica that is not up")

    async def detach(self) -> None:
        await self.send_control(Detach(self.attached.lease))

    async def request_drain(self) -> None:
        await self.send_control(DrainReplica(self.attached.lease))

    async def send(self, *frames: bytes) -> None:
        await within(self.inputs.send_multipart([self.attached.identity, *frames]))

    async def add(self, request_id: str) -> None:
        await self.send(b"add", msgspec.json.encode({"request_id": request_id}))

    async def read(self) -> FakeOutputs:
        return msgspec.json.decode(await within(self.outputs.recv()), type=FakeOutputs)

    async def read_ids(self, count: int) -> list[str]:
        return [(await self.read()).outputs[0].request_id for _ in range(count)]


async def within(awaitable: Any) -> Any:
    """Await with a limit of ten seconds."""
    async with asyncio.timeout(10):
        return await awaitable
