"""Attaching to a replica server, renewing the lease, and every way to lose the replica. Real sockets, fake engines."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace as with_changes

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeRequest
from tests.fakes.free_ports import free_port
from tests.fakes.keeping import Keep
from tests.replicas.remote_head import RemoteHead
from tests.replicas.remote_server import (
    CLIENT_INDEX,
    IDENTITY,
    LEASE,
    FakeEvent,
    FakeServer,
    RemoteApi,
    TimedOutput,
    TimedOutputs,
)
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.fleet_state import ReplicaState
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.control.lease_messages import (
    AttachRefused,
    Detach,
    DrainReplica,
    Expired,
    RenewLease,
    StateTold,
    Status,
)
from vllm_omni_plugin.replicas.remote import remote_replica as remote_module
from vllm_omni_plugin.replicas.remote.remote_replica import AttachRefusedError, ClockOffset

OLD, NEW, FOREIGN = "an old secret of ours", "the new secret of ours", "a secret of others"


class Wire:
    """A tcp connection that can be cut without a FIN to either end, or held up."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])
        self._ends: list[asyncio.StreamWriter] = []
        self._connections: list[asyncio.Future[Any]] = []
        self.cut = False
        self.passes = asyncio.Event()
        self.passes.set()

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self.passes.set()
        self._server.close()
        for end in self._ends:
            end.close()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far_in, far_out = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends += [near_out, far_out]
        self._connections.append(asyncio.gather(self._carry(near_in, far_out), self._carry(far_in, near_out)))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self.passes.wait()
            if not self.cut:
                target.write(data)


def stand_still() -> None:
    """Block the loop for longer than a short heartbeat timeout."""
    time.sleep(2.5)


@pytest.fixture
def head(keep: Keep) -> RemoteHead:
    settings: Any = {"head_id": "head", "heartbeat_interval": 0.02, "heartbeat_timeout": 5.0, "clock": lambda: 1000.0}
    return keep(RemoteHead(RemoteApi(), {"dtype": "bfloat16"}, **settings))


@pytest.fixture
async def server(keep: Keep) -> FakeServer:
    return keep(FakeServer())


@pytest.mark.parametrize(("current", "known"), [(7, 7), (0, 1)], ids=["of the lease", "of an older server"])
async def test_the_head_knows_the_current_incarnation_though_the_list_has_an_older_one(
    head: RemoteHead, server: FakeServer, current: int, known: int
) -> None:
    server.incarnation = current
    async with head.attached(server.info) as replica:
        assert replica.incarnation == known


async def test_times_are_converted_to_our_clock(head: RemoteHead, server: FakeServer) -> None:
    async with head.attached(server.info):
        server.send_outputs(TimedOutputs(timestamp=50.0, outputs=[TimedOutput("a-1", events=[FakeEvent(49.0)])]))
        await eventually(lambda: head.outputs)
        assert head.outputs[0].timestamp == 1000.0
        assert head.outputs[0].outputs[0].events[0].timestamp == 999.0


async def test_what_an_engine_was_told_drain_and_detach_are_sent(head: RemoteHead, server: FakeServer) -> None:
    replica = await head.attach(server.info)
    replica.on_busy = lambda busy: replica.report_told(ReplicaState(4, "y"))
    server.send_control(Status(LEASE, ReplicaStatus.UP, busy=True))
    replica.on_told = lambda told: (replica.request_drain(), replica.close(), replica.close())
    server.send_control(StateTold(LEASE, server.told))
    sent = [StateTold(LEASE, ReplicaState(4, "y")), DrainReplica(LEASE), Detach(LEASE)]
    await eventually(lambda: server.control_messages[-3:] == sent)
    assert (head.deaths, replica.lost.result()) == ([], "closed")


@pytest.mark.parametrize("lasting", [True, False])
async def test_a_refusal_is_an_error_with_the_servers_reason(
    head: RemoteHead, server: FakeServer, lasting: bool
) -> None:
    server.refusal = AttachRefused("dtype: head has bfloat16, replica float16", lasting)
    with pytest.raises(AttachRefusedError, match="dtype: head has bfloat16, replica float16") as caught:
        await head.attach(server.info)
    assert caught.value.lasting is lasting
    assert not server.has_received(Detach)


async def test_draining_and_its_end_are_reported(head: RemoteHead, server: FakeServer) -> None:
    async with head.attached(server.info):
        server.send_control(Status(LEASE, ReplicaStatus.DRAINING))
        await eventually(lambda: ReplicaStatus.DRAINING in head.statuses)
        server.send_control(Status(LEASE, ReplicaStatus.UP))
        await eventually(lambda: head.statuses[-1] is ReplicaStatus.UP)
        assert head.deaths == []


@pytest.mark.parametrize(
    ("message", "reason", "engine_failed"),
    [
        (Status(LEASE, ReplicaStatus.ERROR, "its engine died", engine_failed=True), "its engine died", True),
        (Status(LEASE, ReplicaStatus.ERROR, "its engine hangs"), "its engine hangs", False),
        (Status(LEASE, ReplicaStatus.DOWN), "its server reports down", False),
        (Expired(LEASE), "its server has ended this head's lease", False),
    ],
)
async def test_a_server_that_ends_the_lease_is_a_loss(
    head: RemoteHead, server: FakeServer, message: Status | Expired, reason: str, engine_failed: bool
) -> None:
    async with head.attached(server.info) as replica:
        server.send_control(message)
        await eventually(lambda: head.deaths)
        assert (head.deaths, replica.client.engine_failed) == ([reason], engine_failed)
        with pytest.raises(ReplicaError, match=reason):
            replica.client.add_request(FakeRequest("a"), "a-1")


@pytest.mark.parametrize(
    "sign", [FakeServer.report_death, FakeServer.cut], ids=["its own word", "its connections break"]
)
async def test_the_servers_reason_counts_even_if_another_sign_of_the_loss_arrives_first(
    head: RemoteHead, server: FakeServer, monkeypatch: pytest.MonkeyPatch, sign: Callable[[FakeServer], None]
) -> None:
    monkeypatch.setattr(remote_module, "GRACE_S", 20.0)
    async with head.attached(server.info) as replica:
        sign(server)
        # The sign comes in less time than these take.
        beats = len(server.control_messages)
        await eventually(lambda: head.deaths or len(server.control_messages) > beats + 10)
        server.send_control(Status(LEASE, ReplicaStatus.ERROR, "its worker was ended by SIGILL", engine_failed=True))
        await eventually(lambda: head.deaths)
        assert (head.deaths, replica.client.engine_failed) == (["its worker was ended by SIGILL"], True)


async def test_invalid_messages_and_messages_for_another_lease_are_ignored(
    head: RemoteHead, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with head.attached(server.info):
        server.send_control(Expired(LEASE + 1))
        server.send_control(Status(LEASE + 1, ReplicaStatus.DOWN))
        server.send_frames(b"\xff{")
        server.send_frames(b"one", b"two")
        server.send_control(Status(LEASE, ReplicaStatus.DRAINING))
        await eventually(lambda: ReplicaStatus.DRAINING in head.statuses)
        assert head.deaths == []
    assert caplog.text.count("Dropped an invalid frame") == 1


async def test_outputs_sent_before_the_loss_are_delivered(head: RemoteHead, server: FakeServer) -> None:
    async with head.attached(server.info) as replica:
        replica.client.pause_reading()
        server.send_outputs(TimedOutputs(timestamp=1.0, outputs=[TimedOutput("a-1")]))
        server.send_outputs(TimedOutputs(timestamp=2.0, outputs=[TimedOutput("a-2")]))
        # Later messages of the same sender have been answered, so these have arrived, too.
        beats = len(server.control_messages)
        await eventually(lambda: len(server.control_messages) > beats + 2)
        server.send_control(Status(LEASE, ReplicaStatus.ERROR, "its engine died"))
        await eventually(lambda: head.deaths)
        assert [output.request_id for outputs in head.outputs for output in outputs.outputs] == ["a-1", "a-2"]


async def test_broken_data_connections_are_a_loss(head: RemoteHead, server: FakeServer) -> None:
    async with head.attached(server.info):
        server.cut()
        await eventually(lambda: head.deaths)
        assert head.deaths[0].startswith("the data connection to its server broke")


async def test_a_server_that_does_not_answer_renewals_is_a_loss(head: RemoteHead, server: FakeServer) -> None:
    head.set(heartbeat_timeout=2.0)
    async with head.attached(server.info):
        server.answers_renewals = False
        await eventually(lambda: head.deaths)
        assert head.deaths == ["its server has not answered for 2 s"]


async def test_a_head_that_was_blocked_itself_loses_no_replica(head: RemoteHead, server: FakeServer) -> None:
    head.set(heartbeat_timeout=2.0)
    async with head.attached(server.info):
        heard = len(server.control_messages)
        # Both stand still, since they share the loop: the next beat is late by more than the timeout.
        stand_still()
        await eventually(lambda: len(server.control_messages) > heard + 5)
        assert head.deaths == []


@pytest.fixture
async def wire(server: FakeServer) -> AsyncIterator[Wire]:
    wire = Wire(server.info.control_addr)
    server.info = with_changes(server.info, control_addr=await wire.open())
    yield wire
    await wire.close()


async def test_a_silent_connection_loss_is_a_loss_after_the_lease_timeout(
    head: RemoteHead, server: FakeServer, wire: Wire
) -> None:
    head.set(lease_timeout=1.0)
    async with head.attached(server.info):
        wire.cut = True
        await eventually(lambda: head.deaths)
        assert head.deaths[0].startswith("the connection to its server broke, which had not answered for ")


async def test_beats_say_whether_this_head_has_a_long_call_open(head: RemoteHead, server: FakeServer) -> None:
    async with head.attached(server.info) as replica:
        server.answers_calls = False
        call = asyncio.ensure_future(replica.client.call("sleep"))
        await eventually(lambda: RenewLease(LEASE, busy=True) in server.control_messages)
        call.cancel()
        await asyncio.wait({call})
        server.control_messages.clear()
        await eventually(lambda: RenewLease(LEASE) in server.control_messages)


async def test_a_connection_that_the_system_reports_broken_is_a_loss_at_once(
    head: RemoteHead, server: FakeServer, wire: Wire
) -> None:
    head.set(lease_timeout=60.0, heartbeat_timeout=200.0)
    async with head.attached(server.info):
        await wire.close()
        await eventually(lambda: head.deaths)
        assert head.deaths == ["the connection to its server broke"]


async def test_a_link_that_stands_still_for_less_than_the_lease_timeout_makes_the_replica_late_and_loses_nothing(
    head: RemoteHead, server: FakeServer, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Late after two seconds, in which two heartbeats find no answer; lost long after that.
    monkeypatch.setattr(remote_module, "LATE_SHARE", 0.2)
    head.set(lease_timeout=10.0, heartbeat_timeout=60.0)
    async with head.attached(server.info) as replica:
        late: list[bool] = []
        replica.on_late = late.append
        wire.passes.clear()
        await eventually(lambda: late)
        wire.passes.set()
        await eventually(lambda: len(late) > 1)
        assert (late, head.deaths) == ([True, False], [])


@pytest.mark.parametrize(
    ("silent", "reason"),
    [
        ("answers_calls", "its engine did not answer within 2 s"),
        ("answers_attach", r"its server at tcp://127\.0\.0\.1:\d+ did not answer within 2 s"),
    ],
)
async def test_attaching_to_a_hung_engine_or_server_fails(
    head: RemoteHead, server: FakeServer, silent: str, reason: str
) -> None:
    # Long enough for the handshake on a busy machine, which would be the reason instead.
    head.set(heartbeat_timeout=2.0)
    setattr(server, silent, False)
    with pytest.raises(ReplicaError, match=reason):
        await head.attach(server.info)
    if silent == "answers_calls":
        await eventually(lambda: server.has_received(Detach))


async def test_an_engine_lost_while_attaching_is_an_error_at_once(head: RemoteHead, server: FakeServer) -> None:
    server.answers_calls = False
    attaching = asyncio.ensure_future(head.attach(server.info))
    await eventually(lambda: server.received)
    server.send_control(Status(LEASE, ReplicaStatus.ERROR, "its engine died"))
    with pytest.raises(ReplicaError, match="its engine died"):
        await attaching


@pytest.mark.parametrize(("which", "timeout"), [("control_addr", 1.5), ("output_addr", 5.0)])
async def test_an_unreachable_address_is_an_error_with_our_address_and_the_systems_reason(
    head: RemoteHead, server: FakeServer, which: str, timeout: float
) -> None:
    head.set(heartbeat_timeout=timeout)
    port = free_port()
    server.info = with_changes(server.info, **{which: f"tcp://127.0.0.1:{port}"})
    told = f"announced tcp://127.0.0.1:{port}, which this head cannot reach from 127.0.0.1: Connection refused"
    with pytest.raises(ReplicaError, match=re.escape(told)):
        await head.attach(server.info)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://nowhere", "cannot connect to 'tcp://nowhere'"),
        ("nonsense", "cannot connect to 'nonsense'"),
        ("tcp://127.0.0.1:99999", r"announced tcp://127\.0\.0\.1:99999, which is not a tcp address"),
        (
            "tcp://a..b:7000",
            r"announced tcp://a\.\.b:7000, which this head cannot reach from .*label empty or too long",
        ),
    ],
)
async def test_an_invalid_address_is_an_error(head: RemoteHead, server: FakeServer, address: str, reason: str) -> None:
    head.set(heartbeat_timeout=0.1)
    server.info = with_changes(server.info, control_addr=address)
    with pytest.raises(ReplicaError, match=reason):
        await head.attach(server.info)


async def test_data_sockets_that_refuse_the_credential_are_an_error(head: RemoteHead, server: FakeServer) -> None:
    server.admits = False
    with pytest.raises(ReplicaError, match=r"tcp://127\.0\.0\.1:\d+ refused the data connection"):
        await head.attach(server.info)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [((NEW,), (NEW,)), ((NEW, OLD), (OLD,)), ((OLD,), (OLD, NEW)), ((OLD, NEW), (NEW, OLD))],
    ids=["same", "head knows the new one first", "server knows the new one too", "both turned around"],
)
async def test_ends_with_a_common_secret_connect(
    head: RemoteHead, keep: Keep, ours: tuple[str, ...], theirs: tuple[str, ...]
) -> None:
    server = keep(FakeServer(Secrets(theirs)))
    head.set(secrets=Secrets(ours))
    async with head.attached(server.info) as replica:
        replica.client.add_request(FakeRequest("a"), "a-1")
        await eventually(lambda: len(server.received) == 2)
        assert [(frames[0], frames[-1]) for frames in server.received] == [(IDENTITY, b"%d" % CLIENT_INDEX)] * 2


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ((FOREIGN,), (NEW,), "--omni-secret-file"),
        ((), (NEW,), "--omni-secret-file|before the handshake was done"),
        ((NEW,), (), "--omni-secret-file"),
    ],
    ids=["another secret", "no secret", "a secret too many"],
)
async def test_ends_without_a_common_secret_get_an_error_with_the_reason(
    head: RemoteHead, keep: Keep, ours: tuple[str, ...], theirs: tuple[str, ...], told: str
) -> None:
    server = keep(FakeServer(Secrets(theirs) if theirs else None))
    head.set(secrets=Secrets(ours) if ours else None)
    with pytest.raises(ReplicaError, match=f"{server.info.control_addr}: .*({told})"):
        await head.attach(server.info)
    assert server.control_messages == []


def test_the_fastest_message_gives_the_offset() -> None:
    offset = ClockOffset()
    assert offset.observe(timestamp=10.0, now=110.5) == 100.5
    assert offset.observe(timestamp=11.0, now=111.125) == 100.125
    assert offset.observe(timestamp=12.0, now=119.0) == 100.125


def test_the_offset_follows_clock_drift() -> None:
    offset = ClockOffset()
    assert offset.observe(timestamp=0.0, now=100.0) == 100.0
    assert offset.observe(timestamp=70.0, now=171.0) == 100.0
    assert offset.observe(timestamp=140.0, now=241.0) == 101.0
