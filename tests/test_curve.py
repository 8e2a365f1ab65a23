"""Authentication of peers over real sockets, and the limits of unauthenticated ones."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.utils.monitor

from tests.coordinator.coordinator_support import eventually
from tests.fakes.keeping import keeping
from tests.fakes.raw_peers import raw_peer
from vllm_omni_plugin.curve import (
    PLAIN_USERNAME,
    Secrets,
    ZapHandler,
    require_key,
    require_password,
    secure_client,
    secure_server,
    why_refused,
)
from vllm_omni_plugin.curve.zap_handler import LOG_INTERVAL, RefusalLog

OLD, NEW, OTHER = "the old secret of the fleet", "the new secret of the fleet", "somebody else's secret"
Socket = zmq.Socket[bytes]


class Site:
    """A context with a ZAP handler, and clients of a context of their own, all of which are closed at the end."""

    def __init__(self, secrets: Secrets | None) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.outside: zmq.Context[Socket] = zmq.Context()
        self.now = 0.0
        self.zap_handler = ZapHandler(self.context, secrets, clock=lambda: self.now)
        self.secrets = secrets
        self.opened: list[Socket] = []

    def serve(self, secure: Callable[[Socket], None] | None = None, address: str = "tcp://127.0.0.1:*") -> Socket:
        server = self.context.socket(zmq.ROUTER)
        self.opened.append(server)
        if secure is None:
            secure_server(server, self.secrets, "test")
        else:
            secure(server)
        self.zap_handler.watch(server, "test")
        server.bind(address)
        return server

    def connect(self, server: Socket, secure: Callable[[Socket], None]) -> tuple[int, int]:
        """Return the first event of a client's handshake and its value."""
        client = self.outside.socket(zmq.DEALER)
        client.linger = 0
        client.reconnect_ivl = -1
        secure(client)
        failed = (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        monitor = client.get_monitor_socket(failed | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        monitor.rcvtimeo = 20_000
        client.connect(server.get_string(zmq.LAST_ENDPOINT))
        event = zmq.utils.monitor.recv_monitor_message(monitor)
        client.disable_monitor()
        monitor.close()
        client.close()
        return int(event["event"]), int(event["value"])

    def admits(self, server: Socket, secure: Callable[[Socket], None]) -> bool:
        return self.connect(server, secure)[0] == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        for server in self.opened:
            server.close(linger=0)
        self.zap_handler.close()
        self.context.term()
        self.outside.term()


@pytest.fixture
def sites() -> Iterator[Callable[[Secrets | None], Site]]:
    others = set(threading.enumerate())
    with keeping() as keep:
        yield lambda secrets: keep(Site(secrets))
    assert set(threading.enumerate()) <= others


@pytest.fixture
def site(sites: "OpenSite") -> Site:
    """A site that admits holders of the old secret."""
    site = sites(Secrets([OLD]))
    site.zap_handler.admit_secret_holders("test")
    return site


OpenSite = Callable[[Secrets | None], Site]


def holder(secrets: Secrets | None, role: str = "test", attempt: int = 0) -> Callable[[Socket], None]:
    return lambda socket: secure_client(socket, secrets, role, attempt)


def with_password(password: str, username: str = PLAIN_USERNAME) -> Callable[[Socket], None]:
    def secure(socket: Socket) -> None:
        socket.plain_username, socket.plain_password = username.encode(), password.encode()

    return secure


def with_keys(server_key: bytes, public: bytes, secret: bytes) -> Callable[[Socket], None]:
    def secure(socket: Socket) -> None:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server_key, public, secret

    return secure


def test_holder_of_the_secret_is_admitted_over_ipc(site: Site, tmp_path: Path) -> None:
    server = site.serve(address=f"ipc://{tmp_path}/socket")
    assert [site.admits(server, holder(Secrets([OLD]))) for _ in range(2)] == [True, True]
    assert not site.admits(server, holder(Secrets([OTHER])))


UNAUTHENTICATED = {
    "another secret": holder(Secrets([OTHER])),
    "no secret": lambda socket: None,
    "another mechanism": with_password("x" * 40),
    "the keys of another role": holder(Secrets([OLD]), "replica"),
}


@pytest.mark.parametrize("client", UNAUTHENTICATED.values(), ids=UNAUTHENTICATED.keys())
def test_an_unauthenticated_peer_is_refused_and_logged(
    site: Site, client: Callable[[Socket], None], caplog: pytest.LogCaptureFixture
) -> None:
    server = site.serve()
    assert not site.admits(server, client)
    eventually(lambda: "Refused a connection at the test socket: " in caplog.text)
    assert site.admits(server, holder(Secrets([OLD])))


def test_a_peer_that_ends_in_the_handshake_is_not_said_to_have_another_secret(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_peer(port_of(site.serve())):
        pass
    eventually(lambda: "it ended the connection or did not answer" in caplog.text)


def test_a_peer_that_is_ahead_in_a_rotation_is_not_said_to_have_another_secret_only(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    server, both = site.serve(), Secrets([NEW, OLD])
    assert [site.admits(server, holder(both, attempt=attempt)) for attempt in range(2)] == [False, True]
    eventually(lambda: "its secret is not the first line of this end's --omni-secret-file" in caplog.text)
    assert "while secrets are rotated, a peer may try its two in turn" in caplog.text


@pytest.mark.parametrize("secrets", [None, Secrets([OLD])])
def test_a_server_that_ends_the_connection_in_the_handshake_is_not_said_to_have_refused_the_secret(
    secrets: Secrets | None,
) -> None:
    ended = why_refused(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE, secrets)
    refused = why_refused(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, secrets)
    assert refused.startswith("refused secret: ")
    assert ended == f"it ended the connection in the handshake; if that goes on: {refused}"


def test_client_key_that_is_not_admitted_is_refused(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    own = zmq.curve_keypair()
    event, _ = site.connect(site.serve(), with_keys(Secrets([OLD]).server_keys("test").public, *own))
    assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    told = "Refused a connection at the test socket: its key or password is not admitted there"
    eventually(lambda: told in caplog.text)


def test_secured_socket_admits_no_peer_without_a_zap_handler(sites: OpenSite) -> None:
    secrets = Secrets([OLD])
    site = sites(secrets)
    context: zmq.Context[Socket] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    secure_server(server, secrets, "test")
    server.bind("tcp://127.0.0.1:*")
    assert not site.admits(server, holder(secrets))
    server.close(linger=0)
    context.term()


def test_leased_key_is_admitted_to_its_own_domain(sites: OpenSite) -> None:
    site = sites(Secrets([OLD]))
    own_public, own_secret = zmq.curve_keypair()
    lease = zmq.curve_keypair()
    mine, theirs = (site.serve(lambda socket, name=name: require_key(socket, own_secret, name)) for name in "ab")  # type: ignore[misc]
    client = with_keys(own_public, *lease)
    assert not site.admits(mine, client)
    site.zap_handler.admit("a", lease[0].decode())
    assert site.admits(mine, client)
    assert not site.admits(theirs, client)


def test_leased_password_is_admitted_without_a_secret(sites: OpenSite) -> None:
    site = sites(None)
    server = site.serve(lambda socket: require_password(socket, "a"))
    site.zap_handler.admit("a", "x" * 40)
    assert site.admits(server, with_password("x" * 40))
    assert not site.admits(server, with_password("y" * 40))
    assert not site.admits(server, with_password("x" * 40, "another user"))
    assert not site.admits(server, holder(None))


def test_admissions_may_change_in_any_thread_while_peers_connect(sites: OpenSite) -> None:
    site = sites(None)
    server = site.serve(lambda socket: require_password(socket, "a"))
    site.zap_handler.admit("a", "x" * 40)
    over = threading.Event()

    def change(name: str) -> None:
        while not over.is_set():
            site.zap_handler.admit("a", name)

    changers = [threading.Thread(target=change, args=(name,)) for name in "bc"]
    for changer in changers:
        changer.start()
    admitted = [site.admits(server, with_password("x" * 40)) for _ in range(50)]
    over.set()
    for changer in changers:
        changer.join()
    assert all(admitted)


def port_of(server: Socket) -> int:
    return int(server.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


@pytest.mark.parametrize("mechanism", ["CURVE", "PLAIN"])
def test_authenticated_peer_may_send_large_messages_at_once(site: Site, mechanism: str) -> None:
    site.zap_handler.admit("test", "x" * 40)
    encrypted = mechanism == "CURVE"
    server = site.serve(None if encrypted else lambda socket: require_password(socket, "test"))
    show = holder(Secrets([OLD])) if encrypted else with_password("x" * 40)
    server.rcvtimeo = 20_000
    for _ in range(20):
        client = site.outside.socket(zmq.DEALER)
        site.opened.append(client)
        client.linger = 0
        show(client)
        client.connect(server.get_string(zmq.LAST_ENDPOINT))
        for _ in range(10):
            client.send(bytes(2**20))
        assert [len(server.recv_multipart()[1]) for _ in range(10)] == [2**20] * 10


def test_sockets_may_open_and_close_while_the_zap_handler_runs(site: Site) -> None:
    descriptors = []
    for _ in range(10):
        server = site.serve()
        assert site.admits(server, holder(Secrets([OLD])))
        server.close(linger=0)
        site.opened.remove(server)
        descriptors.append(len(os.listdir("/proc/self/fd")))
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors[2])


def test_context_has_one_zap_handler_and_a_closed_one_watches_no_socket(sites: OpenSite) -> None:
    site = sites(None)
    with pytest.raises(zmq.ZMQError):
        ZapHandler(site.context, None)
    site.zap_handler.close()
    site.zap_handler.close()
    with pytest.raises(RuntimeError):
        site.serve()


def test_a_reason_is_logged_once_a_minute_for_each_socket(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = RefusalLog(lambda: now)
    for where, why in (("a", "x"), ("a", "x"), ("b", "x"), ("a", "y")):
        log.record(where, why)
    now = LOG_INTERVAL
    log.record("a", "x")
    logged = [record.args[:2] for record in caplog.records if isinstance(record.args, tuple)]
    assert logged == [("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")]
