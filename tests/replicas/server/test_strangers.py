"""Nobody but a lease's holder reaches the engine, and nothing on the wire ends or disturbs the service."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeRequest, FakeUtilityOutput
from tests.fakes.hostile_frames import hostile_message, hostile_stream
from tests.fakes.raw_peers import raw_peer
from tests.replicas.remote_server import RemoteApi, TimedOutputs
from tests.replicas.server.conftest import MakeHead, Node, StartNode
from tests.replicas.server.heads import Head
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import MessageTooLargeError, ReplicaError
from vllm_omni_plugin.replicas.control.lease_messages import (
    PROTOCOL_VERSION,
    Attach,
    Detach,
    Expired,
    RenewLease,
    Status,
    encode,
)
from vllm_omni_plugin.replicas.replica_server import attached_heads
from vllm_omni_plugin.replicas.replica_server.data_proxy import DataProxy
from vllm_omni_plugin.replicas.replica_server.server_settings import ServerSettings
from vllm_omni_plugin.vllm_api.codecs.message_filter import Rejection

SECRETS = Secrets(["correct horse battery staple"])
OTHERS = Secrets(["another secret of enough length"])
MODES = pytest.mark.parametrize("secrets", [None, SECRETS], ids=["open", "secret"])

SAMPLES = [
    encode(Attach(PROTOCOL_VERSION, 1, "h", "c" * 40, {"model": "tiny"})),
    encode(RenewLease(1)),
    encode(Detach(1)),
    b'{"type":"attach"}',
    b"[" * 5000,
]


async def works(node: Node, head: Head) -> None:
    """The lease is valid, both directions work, and only this head's messages have reached the engine."""
    assert await head.renew() == Status(head.attached.lease, ReplicaStatus.UP)
    await head.add("mine")
    await eventually(lambda: any(b"mine" in frames[-1] for frames in node.engine.frames))
    node.engine.send_tokens(head.attached.client_index, "mine")
    assert await head.read_ids(1) == ["mine"]
    expected = ([b"add", msgspec.json.encode({"request_id": "mine"})],)
    assert all(frames in expected for frames in node.engine.frames if frames[0] != b"utility")


@MODES
async def test_random_and_mutated_frames_change_nothing(start_node: StartNode, secrets: Secrets | None) -> None:
    node = await start_node(secrets=secrets)
    rng = random.Random(7)
    async with node.attached() as head, node.head() as stranger:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets: list[zmq.Socket[bytes]] = []
        for address in (head.attached.input_addr, head.attached.output_addr, node.server.control_addr):
            for kind in (zmq.DEALER, zmq.PUSH, zmq.PUB):
                socket = context.socket(kind)
                sockets.append(socket)
                socket.sndhwm = 0
                socket.connect(address)
                for _ in range(300):
                    # Where a port lets nobody in, nothing can be sent any more.
                    with contextlib.suppress(zmq.Again):
                        socket.send_multipart(hostile_message(rng, SAMPLES), zmq.NOBLOCK)
        for _ in range(3000):
            await stranger.send_frames(hostile_message(rng, SAMPLES))
        await stranger.send_control(RenewLease(1))
        await stranger.next_message()
        await works(node, head)
        context.destroy(linger=0)


@MODES
async def test_peers_that_speak_no_zmtp_change_nothing(start_node: StartNode, secrets: Secrets | None) -> None:
    node = await start_node(secrets=secrets)
    rng = random.Random(8)
    async with node.attached() as head:
        half_open = []
        for address in (head.attached.input_addr, head.attached.output_addr, node.server.control_addr):
            host, port = address.removeprefix("tcp://").split(":")
            for turn in range(30):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(hostile_stream(rng, 20))
                if turn % 2:
                    writer.close()
                else:
                    half_open.append(writer)
        await works(node, head)
        for writer in half_open:
            writer.close()


async def test_peers_with_a_too_large_frame_before_the_handshake_are_disconnected_on_every_port(
    start_node: StartNode,
) -> None:
    node = await start_node(secrets=SECRETS)
    async with node.attached() as head:
        connections = psutil.Process().net_connections("tcp")
        ports = [found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN]
        # The coordinator's two, and those for control, requests and outputs.
        assert len(ports) == 5
        for port in ports:
            with raw_peer(port) as peer:
                peer.send_frame_header(2**62)
                assert await asyncio.to_thread(peer.is_disconnected), port
        await works(node, head)


@MODES
async def test_a_message_of_the_size_limit_passes_and_a_larger_one_is_an_error_before_it_is_sent(
    start_node: StartNode, make_head: MakeHead, secrets: Secrets | None
) -> None:
    node = await start_node(secrets=secrets, max_message_bytes=2**20)
    head = make_head(secrets)
    rest = sum(map(len, RemoteApi().encode_add(FakeRequest(""), "")))
    async with head.attached(await node.up()) as replica:
        # Each character of the id is a byte of the message.
        largest = "x" * (2**20 - rest)
        with pytest.raises(MessageTooLargeError, match=r"1\.0 MiB.*1 MiB are allowed \(--omni-max-message-size"):
            replica.client.add_request(FakeRequest(""), largest + "x")
        replica.client.add_request(FakeRequest(""), largest)
        await eventually(lambda: any(largest.encode() in frames[1] for frames in node.engine.frames))
        assert await replica.client.call("is_sleeping") is False
        assert not head.deaths


async def test_a_forbidden_call_is_answered_with_an_error_and_does_not_reach_the_engine(
    start_node: StartNode, make_head: MakeHead
) -> None:
    def reject(frames: Sequence[Any]) -> Rejection | None:
        call = bytes(frames[1])
        if b"save_sharded_state" not in call:
            return None
        answer = FakeUtilityOutput(msgspec.json.decode(call)[0], "heads may not")
        return Rejection("heads may not", [msgspec.json.encode(TimedOutputs(utility_output=answer))])

    node = await start_node(message_filter=reject)
    async with make_head().attached(await node.up()) as replica:
        with pytest.raises(ReplicaError, match="heads may not"):
            await replica.client.call("save_sharded_state", "/root")
        assert await replica.client.call("is_sleeping") is False
        assert not any(method == "save_sharded_state" for _, method in node.engine.calls)


async def test_the_size_limit_holds_for_all_frames_of_a_message_together(start_node: StartNode) -> None:
    node = await start_node(max_message_bytes=2**20)
    async with node.attached() as head:
        await head.send(b"add", b'{"request_id": "too large"}', *[bytes(2**20)] * 2)
        await works(node, head)


async def test_outputs_over_the_heads_limit_are_a_loss_with_the_flag_in_the_reason(
    node: Node, make_head: MakeHead
) -> None:
    head = make_head(max_message_bytes=2**20)
    async with head.attached(await node.up()):
        node.engine.send_tokens(0, "x" * 2**20)
        await eventually(lambda: head.deaths)
    assert "--omni-max-message-size" in head.deaths[0]


@pytest.mark.parametrize("stranger_secrets", [None, OTHERS], ids=["no secret", "another secret"])
async def test_a_head_without_the_secret_cannot_attach(start_node: StartNode, stranger_secrets: Secrets | None) -> None:
    node = await start_node(secrets=SECRETS)
    info = await node.up()
    async with node.head(secrets=stranger_secrets) as stranger, node.attached() as head:
        asking = asyncio.create_task(stranger.try_attach(info.incarnation))
        await works(node, head)
        assert not asking.done()
        asking.cancel()


@MODES
async def test_a_credential_is_not_valid_for_the_data_ports_of_another_lease(
    start_node: StartNode, secrets: Secrets | None
) -> None:
    node = await start_node(secrets=secrets)
    async with node.attached() as head, node.attached() as other:
        inputs, outputs = await other.connect(head.attached, other.credential)
        await try_to_send(inputs, [head.attached.identity, b"add", b'{"request_id": "smuggled"}'])
        await works(node, head)
        assert not await outputs.poll(0)
        node.engine.send_tokens(other.attached.client_index, "theirs")
        assert await other.read_ids(1) == ["theirs"]


async def try_to_send(socket: Any, frames: list[bytes]) -> None:
    """Send, unless the connection was refused: then the send would block for ever."""
    with contextlib.suppress(zmq.Again):
        await socket.send_multipart(frames, zmq.NOBLOCK)


@MODES
async def test_a_head_cannot_write_after_its_lease(start_node: StartNode, secrets: Secrets | None) -> None:
    node = await start_node(secrets=secrets)
    async with node.attached() as head:
        await head.add("before")
        await eventually(lambda: any(b"before" in frames[-1] for frames in node.engine.frames))
        former = head.inputs, head.attached
        await head.detach()
        assert isinstance(await head.renew(), Expired)
        async with node.attached(slot=0) as next_head:
            assert former[1] is not None
            assert next_head.attached.input_addr == former[1].input_addr
            await try_to_send(former[0], [former[1].identity, b"add", b'{"request_id": "after"}'])
            await next_head.add("next")
            await eventually(lambda: any(b"next" in frames[-1] for frames in node.engine.frames))
            assert not any(b"after" in frames[-1] for frames in node.engine.frames)


async def test_a_head_that_does_not_read_loses_its_lease(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def less_patient(ports: Any, credential: str, settings: ServerSettings, *others: Any, **named: Any) -> DataProxy:
        return DataProxy(ports, credential, replace(settings, heartbeat_timeout=1.0), *others, **named)

    # Of the proxy only: the lease must not end first, nor the engine be taken for one that hangs.
    monkeypatch.setattr(attached_heads, "DataProxy", less_patient)
    async with node.attached() as head:
        head.outputs.close()
        _, head.outputs = await head.connect(head.attached, head.credential, rcvhwm=1, rcvbuf=4096)
        node.engine.send_tokens(0, *["x" * 10_000] * 3000)
        assert "it has left or was cut off, did not read for too long" in (await head.renew_while_up()).reason
        await eventually(lambda: node.engine.aborted)
