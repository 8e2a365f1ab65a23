"""What the coordinator does for a node that asks whether it is reached: real sockets, and nothing that blocks."""

import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.fakes.free_ports import free_port
from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator.client.head_query import answer_with_nonce
from vllm_omni_plugin.coordinator.protocol.head_messages import REACHABILITY_TIMEOUT_S
from vllm_omni_plugin.coordinator.server import reachability_checks
from vllm_omni_plugin.coordinator.server.reachability_checks import ReachabilityChecks
from vllm_omni_plugin.errors import WireError

NODE, OTHER = b"node", b"other"
NONCE = "0123456789abcdef"

Listen = Callable[..., str]


@pytest.fixture
def trials(keep: Keep) -> ReachabilityChecks:
    return keep(ReachabilityChecks())


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Opens ports that say something to who connects, or nothing; returns their addresses."""
    with ExitStack() as stack:

        def listen(said: bytes | None = None, host: str = "127.0.0.1") -> str:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = stack.enter_context(socket.create_server((host, 0), family=family))
            if said is not None:
                stack.enter_context(answer_with_nonce([server], said))
            return f"tcp://[{host}]:{server.getsockname()[1]}" if ":" in host else address(server)

        yield listen


def address(server: socket.socket) -> str:
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def result(trials: ReachabilityChecks, now: float = 0.0) -> dict[bytes, dict[str, str]]:
    """What peers are told next, once something comes."""
    while True:
        told = {peer: dict(reached.unreached) for peer, reached in trials.take(now)}
        if told:
            return told
        assert select.select([trials], [], [], 10)[0], "nothing came"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ports_that_say_the_nonce_are_reached(trials: ReachabilityChecks, listen: Listen, host: str) -> None:
    assert trials.begin(NODE, [listen(NONCE.encode(), host=host) for _ in range(3)], NONCE, 0.0)
    assert result(trials) == {NODE: {}}


def test_a_nonce_that_comes_in_parts_is_one(trials: ReachabilityChecks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert trials.begin(NODE, [address(server)], NONCE, 0.0)
        connection, _ = server.accept()
        with connection:
            connection.sendall(NONCE[:3].encode())
            assert select.select([trials], [], [], 10)[0]
            assert trials.take(0.0) == []
            connection.sendall(NONCE[3:].encode())
            assert result(trials) == {NODE: {}}


@pytest.mark.parametrize(
    "said", [b"fedcba9876543210", b"", b"0123456789abcdeX", b"\xff\x00"], ids=["another", "nothing", "nearly", "binary"]
)
def test_what_answers_in_place_of_the_node_is_not_the_node(
    trials: ReachabilityChecks, listen: Listen, said: bytes
) -> None:
    node, other = listen(NONCE.encode()), listen(said)
    assert trials.begin(NODE, [node, other], NONCE, 0.0)
    assert result(trials) == {NODE: {other: "something else answers"}}


def test_a_port_on_which_nobody_listens_is_told_with_the_reason(trials: ReachabilityChecks, listen: Listen) -> None:
    closed = f"tcp://127.0.0.1:{free_port()}"
    assert trials.begin(NODE, [listen(NONCE.encode()), closed], NONCE, 0.0)
    assert result(trials) == {NODE: {closed: "Connection refused"}}


def test_what_cannot_even_be_tried_is_told_without_waiting(trials: ReachabilityChecks) -> None:
    # The kernel refuses this at once.
    assert trials.begin(NODE, ["tcp://255.255.255.255:1"], NONCE, 0.0)
    ((_, reached),) = trials.take(0.0)
    # The first with no way to other machines, the second with one.
    assert reached.unreached["tcp://255.255.255.255:1"] in map(os.strerror, (errno.ENETUNREACH, errno.EACCES))


def test_no_descriptor_left_is_told_and_ends_nothing(
    trials: ReachabilityChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(reachability_checks.socket, "socket", none_left)
    assert trials.begin(NODE, ["tcp://127.0.0.1:1"], NONCE, 0.0)
    assert result(trials) == {NODE: {"tcp://127.0.0.1:1": "Too many open files"}}


def test_a_port_that_says_nothing_is_given_up_at_its_time_and_not_before(
    trials: ReachabilityChecks, listen: Listen
) -> None:
    silent = listen()
    assert trials.begin(NODE, [silent, listen(NONCE.encode())], NONCE, 100.0)
    assert trials.next_deadline() == 100.0 + REACHABILITY_TIMEOUT_S
    assert select.select([trials], [], [], 10)[0]
    assert trials.take(99.9 + REACHABILITY_TIMEOUT_S) == []
    ((peer, reached),) = trials.take(100.0 + REACHABILITY_TIMEOUT_S)
    assert (peer, reached.unreached) == (NODE, {silent: "no answer within 2 s"})
    assert trials.next_deadline() is None


def test_a_peer_has_one_trial_at_a_time(trials: ReachabilityChecks, listen: Listen) -> None:
    port = listen(NONCE.encode())
    assert trials.begin(NODE, [port], NONCE, 0.0)
    assert result(trials) == {NODE: {}}
    assert not trials.begin(NODE, [port], NONCE, 1.0)
    assert trials.begin(OTHER, [port], NONCE, 1.0)
    assert result(trials, 1.0) == {OTHER: {}}
    trials.take(REACHABILITY_TIMEOUT_S)
    assert trials.begin(NODE, [port], NONCE, REACHABILITY_TIMEOUT_S)


def test_all_peers_together_have_few_connections_in_the_time_of_a_trial(keep: Keep, listen: Listen) -> None:
    trials = keep(ReachabilityChecks(places=3))
    port, other = listen(NONCE.encode()), listen(NONCE.encode())
    assert trials.begin(NODE, [port, other], NONCE, 0.0)
    assert result(trials) == {NODE: {}}
    assert not trials.begin(OTHER, [port, other], NONCE, 1.0)
    trials.take(REACHABILITY_TIMEOUT_S)
    assert trials.begin(OTHER, [port, other], NONCE, REACHABILITY_TIMEOUT_S)


@pytest.mark.parametrize(("places", "addresses", "nonce"), [(0, 1, NONCE), (9, 0, NONCE), (9, 1, "")])
def test_without_places_addresses_or_a_nonce_nothing_is_tried(
    keep: Keep, places: int, addresses: int, nonce: str
) -> None:
    trials = keep(ReachabilityChecks(places))
    assert not trials.begin(NODE, ["tcp://127.0.0.1:1"] * addresses, nonce, 0.0)
    assert (trials.next_deadline(), trials.take(99.0)) == (None, [])


@pytest.mark.parametrize(
    "bad",
    [
        "tcp://head.example:1",
        "127.0.0.1:1",
        "udp://127.0.0.1:1",
        "ipc:///tmp/x",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1",
    ],
)
def test_an_address_that_is_not_numeric_is_refused_before_anything_is_tried(
    trials: ReachabilityChecks, bad: str
) -> None:
    with pytest.raises(WireError, match="expected tcp addresses with numeric hosts"):
        trials.begin(NODE, ["tcp://127.0.0.1:1", bad], NONCE, 0.0)
    assert trials.next_deadline() is None
    assert trials.begin(NODE, ["tcp://127.0.0.1:1"], NONCE, 0.0)
