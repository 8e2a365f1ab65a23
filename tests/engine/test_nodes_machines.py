"""A replica over two machines, which are two ends of a cable: it serves, and is back after the loss of any part."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from .conftest import QUICK_HEARTBEATS
from .load import no_stream_suffers, undisturbed
from .namespaces import HEAD_ADDRESS, NEEDS_NAMESPACES, NODE_ADDRESS, Cable, at
from .nodes import Node, NodeFleet
from .server import IN_FLIGHT, WORKERS, replicas, serve_command, until

TOKENS = 600
STREAMS = 3
FIRST, OTHER = 0, 1

pytestmark = [pytest.mark.long, NEEDS_NAMESPACES]


class MachinesFleet(NodeFleet):
    """A head and one replica, whose first machine is at the head's end of the cable; `nodes` are its machines."""

    def __init__(self, model: Path, log: Path, cable: Cable) -> None:
        self._at = (at(cable.head), cable.at_node)
        waits = ("--omni-replica-wait", "200")
        super().__init__(model, log, nodes=2, cable=cable, flags=(*QUICK_HEARTBEATS, *WORKERS), head_flags=waits)

    def add_node(self, *flags: str) -> Node:
        # The other machine comes first.
        rank = OTHER if not self.nodes else FIRST
        self.nodes.insert(0, self.start_machine(rank))
        return self.nodes[0]

    def start_machine(self, rank: int) -> Node:
        machines = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", HEAD_ADDRESS)
        flags = (*self.join, *self._flags, *machines, "--node-rank", str(rank))
        command = serve_command(self._model, "--headless", *flags)
        return Node([*self._at[rank], *command], self._new_log(f"machine-{rank}"))

    def wait_for_replicas(self, count: int) -> None:
        super().wait_for_replicas(min(count, 1))

    def processes(self, rank: int, name: str = "") -> list[psutil.Process]:
        """A machine's processes with this beginning of their name; by default its command and all of them."""
        command = psutil.Process(self.nodes[rank].process.pid)
        return [each for each in (command, *command.children(recursive=True)) if each.name().startswith(name)]


@pytest.fixture(scope="module")
def pair(tiny_model: Path, logs: Path, cable: Cable, make_room: None) -> Iterator[MachinesFleet]:
    with MachinesFleet(tiny_model, logs / "machines.log", cable) as running:
        yield running


@pytest.fixture(scope="module")
def texts(pair: MachinesFleet) -> list[str]:
    return undisturbed(pair.head, STREAMS, TOKENS)


@contextmanager
def streams(pair: MachinesFleet, texts: list[str]) -> Iterator[None]:
    """What happens in the block loses no token of streams, and the replica serves again after it."""
    with no_stream_suffers(pair.head, texts, TOKENS):
        yield
    pair.wait_for_replicas(1)
    assert set(pair.head.by_replica(IN_FLIGHT).values()) == {0}


def test_the_replica_is_shown_with_its_machines(pair: MachinesFleet) -> None:
    with pair.head.http(10) as client:
        (replica,) = replicas(client).values()
    assert replica["machines"] == [HEAD_ADDRESS, NODE_ADDRESS]


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        pytest.param(OTHER, "VLLM::Worker", id="worker of the other machine"),
        pytest.param(FIRST, "VLLM::Worker", id="worker of the first machine"),
        pytest.param(FIRST, "VLLM::EngineCore", id="engine core"),
    ],
)
def test_a_killed_process_ends_the_replica_and_all_meet_again(
    pair: MachinesFleet, texts: list[str], rank: int, name: str
) -> None:
    old = pair.processes(OTHER, "VLLM::Worker") + pair.processes(FIRST, "VLLM::Worker")
    with streams(pair, texts):
        (process,) = pair.processes(rank, name)
        process.kill()
        until(lambda: not any(each.is_running() for each in old), "nothing is left of the old meeting")


@pytest.mark.parametrize("rank", [OTHER, FIRST], ids=["other machine", "first machine"])
def test_a_killed_command_is_started_again_and_all_meet_again(pair: MachinesFleet, texts: list[str], rank: int) -> None:
    with streams(pair, texts):
        pair.nodes[rank].kill()
        pair.nodes[rank] = pair.start_machine(rank)


def hang(pair: MachinesFleet, _cable: Cable) -> Callable[[], None]:
    stopped = pair.processes(OTHER)
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    return lambda: [process.resume() for process in stopped] and None


def cut(_pair: MachinesFleet, cable: Cable) -> Callable[[], None]:
    cable.cut()
    return cable.mend


@pytest.mark.parametrize("fault", [hang, cut])
def test_a_machine_that_does_not_answer_ends_the_replica_until_it_is_back(
    pair: MachinesFleet, texts: list[str], cable: Cable, fault: Callable[..., Callable[[], None]]
) -> None:
    with streams(pair, texts):
        mend = fault(pair, cable)
        try:
            until(lambda: pair.head.replicas_up() == 0, "the replica has ended")
            until(lambda: pair.nodes[FIRST].log.read_text().count("has not answered"), "for the right reason")
        finally:
            mend()


def test_sigterm_to_the_other_machine_lets_streams_finish_first(pair: MachinesFleet, texts: list[str]) -> None:
    with streams(pair, texts):
        pair.nodes[OTHER].process.send_signal(signal.SIGTERM)
        assert pair.nodes[OTHER].process.wait(60) == 0
        assert pair.nodes[FIRST].process.wait(60) == 0
        for rank in (FIRST, OTHER):
            pair.nodes[rank] = pair.start_machine(rank)
