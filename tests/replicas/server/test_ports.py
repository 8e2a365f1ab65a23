"""Ports: ranges, what cannot be bound, and a port that is kept between two ZMQ sockets."""

import socket

import pytest
import zmq

from tests.fakes.free_ports import free_port
from tests.replicas.server.conftest import StartNode
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.replicas.control.lease_messages import AttachRefused
from vllm_omni_plugin.replicas.links.replica_ports import PortRange, close_all, listen_on_ports

LOOPBACK = "127.0.0.1"


def free_ports(count: int) -> PortRange:
    first = free_port()
    return PortRange(first, first + count - 1)


def test_a_range_is_parsed() -> None:
    assert PortRange.parse(" 20000-20100 ") == PortRange(20000, 20100)
    assert PortRange.parse("7000-7000") == PortRange(7000, 7000)


@pytest.mark.parametrize("text", ["", "20000", "20100-20000", "0-5", "1-65536", "a-b", "1-2-3", "-1-5", "1--5"])
def test_an_invalid_range_is_an_error_with_the_flags_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--omni-replica-ports"):
        PortRange.parse(text)


def test_ports_of_a_range_are_bound_in_order() -> None:
    ports = free_ports(3)
    listeners = listen_on_ports(LOOPBACK, ports, 3)
    try:
        assert [listener.address for listener in listeners] == [
            f"tcp://127.0.0.1:{port}" for port in range(ports.first, ports.last + 1)
        ]
        with pytest.raises(ConfigError, match=f"--omni-replica-ports: of {ports} 0 are free"):
            listen_on_ports(LOOPBACK, ports, 1)
    finally:
        close_all(listeners)


def test_all_ports_or_none_are_bound() -> None:
    ports = free_ports(2)
    with pytest.raises(ConfigError, match=f"of {ports} 2 are free on {LOOPBACK}, and 3 are needed"):
        listen_on_ports(LOOPBACK, ports, 3)
    close_all(listen_on_ports(LOOPBACK, ports, 2))


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "::", "no.such.host.invalid"])
def test_an_address_that_cannot_be_bound_is_an_error_with_the_flags_name(host: str) -> None:
    with pytest.raises(ConfigError, match="--omni-replica-address"):
        listen_on_ports(host, None, 1)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_is_announced_in_brackets(host: str) -> None:
    try:
        (listener,) = listen_on_ports(host, None, 1)
    except ConfigError:
        pytest.skip("no IPv6 loopback here")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        assert listener.address.startswith("tcp://[::1]:")
        listener.bind(pull)
        push.ipv6 = True
        push.connect(listener.address)
        push.send(b"x")
        assert pull.poll(10_000)
    finally:
        context.destroy(linger=0)
        listener.close()


def test_a_port_stays_bound_between_two_sockets() -> None:
    (listener,) = listen_on_ports(LOOPBACK, None, 1)
    port = int(listener.address.rpartition(":")[2])
    for _ in range(3):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context.socket(zmq.PULL) as pull:
            listener.bind(pull)
        context.term()
        with pytest.raises(ConfigError):
            listen_on_ports(LOOPBACK, PortRange(port, port), 1)
    listener.close()
    close_all(listen_on_ports(LOOPBACK, PortRange(port, port), 1))


async def test_a_server_without_free_ports_starts_no_engine(start_node: StartNode) -> None:
    node = await start_node(ports=free_ports(2))
    with pytest.raises(ConfigError, match="--omni-replica-ports"):
        await node.running
    assert node.launcher.engines == []


async def test_a_head_is_refused_while_no_port_is_free(start_node: StartNode) -> None:
    node = await start_node(ports=free_ports(4))
    async with node.attached() as first, node.head() as second:
        info = await node.up()
        answer = await second.try_attach(info.incarnation)
        assert isinstance(answer, AttachRefused)
        assert not answer.lasting
        assert "--omni-replica-ports" in answer.reason
        await first.detach()
        await second.attach(info.incarnation)
