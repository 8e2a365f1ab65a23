"""A replica or lockstep group over two machines, two ends of a cable: it serves, and is back after the loss of a part.

Those of a group sleep instead of computing.
"""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

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

pytestmark = NEEDS_NAMESPACES


@dataclass(frozen=True)
class Layout:
    """What runs on the machines.

    Attributes:
        sizes: flags of the machines; `flags` are for the head, too.
        replicas: how many the head sees.
        parts: machine and process name of what ends all if it ends.
        shown: the machines that the head shows of each replica.
    """

    sizes: tuple[str, ...]
    flags: tuple[str, ...]
    replicas: int
    parts: Mapping[str, tuple[int, str]]
    shown: list[str]


TENSOR = Layout(
    ("--tensor-parallel-size", "2"),
    WORKERS,
    1,
    {
        "other machine": (OTHER, "VLLM::Worker"),
        "first machine": (FIRST, "VLLM::Worker"),
        "of both": (FIRST, "VLLM::EngineCore"),
    },
    [HEAD_ADDRESS, NODE_ADDRESS],
)
PIPELINE = replace(
    TENSOR,
    sizes=("--pipeline-parallel-size", "2"),
    # Eagerly, vLLM's CPU worker of a later stage has no buffers for what comes from the stage before.
    flags=(*WORKERS, "--no-enforce-eager", "--compilation-config", '{"mode": 2, "backend": "eager"}'),
)
GROUP = Layout(
    ("--data-parallel-size", "2"),
    (
        "--distributed-executor-backend",
        "tests.fakes.sleeping_executor.SleepingExecutor",
        "--additional-config",
        json.dumps({"sleeping_executor": {"step_s": 0.005, "prefill_token_s": 0, "sequence_s": 0}}),
    ),
    2,
    {
        "other machine": (OTHER, "VLLM::EngineCore"),
        "first machine": (FIRST, "VLLM::EngineCore"),
        "of both": (FIRST, "VLLM::DPCoordinator"),
    },
    [],
)


class MachinesFleet(NodeFleet):
    """A head, and machines whose first one is at the head's end of the cable; `nodes` are the machines."""

    def __init__(self, layout: Layout, model: Path, log: Path, cable: Cable) -> None:
        self.layout = layout
        self._at = (at(cable.head), cable.at_node)
        waits = ("--omni-replica-wait", "200")
        super().__init__(model, log, nodes=2, cable=cable, flags=(*QUICK_HEARTBEATS, *layout.flags), head_flags=waits)

    def add_node(self, *flags: str) -> Node:
        # The other machine comes first.
        rank = OTHER if not self.nodes else FIRST
        self.nodes.insert(0, self.start_machine(rank))
        return self.nodes[0]

    def start_machine(self, rank: int) -> Node:
        machines = (*self.layout.sizes, "--nnodes", "2", "--master-addr", HEAD_ADDRESS)
        flags = (*self.join, *self._flags, *machines, "--node-rank", str(rank))
        command = serve_command(self._model, "--headless", *flags)
        return Node([*self._at[rank], *command], self._new_log(f"machine-{rank}"))

    def wait_for_replicas(self, count: int) -> None:
        super().wait_for_replicas(self.layout.replicas)

    def processes(self, rank: int, name: str = "") -> list[psutil.Process]:
        """A machine's processes with this beginning of their name; by default its command and all of them."""
        command = psutil.Process(self.nodes[rank].process.pid)
        return [each for each in (command, *command.children(recursive=True)) if each.name().startswith(name)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(GROUP, id="lockstep group"),
        pytest.param(TENSOR, id="tensor parallel", marks=pytest.mark.long),
        pytest.param(PIPELINE, id="pipeline parallel", marks=pytest.mark.long),
    ],
)
def pair(
    request: pytest.FixtureRequest, tiny_model: Path, experts: Path, logs: Path, cable: Cable, make_room: None
) -> Iterator[MachinesFleet]:
    layout = cast(Layout, request.param)
    model = experts if layout is GROUP else tiny_model
    with MachinesFleet(layout, model, logs / f"machines{layout.sizes[0]}.log", cable) as running:
        yield running


@pytest.fixture(scope="module")
def texts(pair: MachinesFleet) -> list[str]:
    return undisturbed(pair.head, STREAMS, TOKENS)


@contextmanager
def streams(pair: MachinesFleet, texts: list[str]) -> Iterator[None]:
    """What happens in the block loses no token of streams, and all replicas serve again after it."""
    with no_stream_suffers(pair.head, texts, TOKENS):
        yield
    pair.wait_for_replicas(pair.layout.replicas)
    assert set(pair.head.by_replica(IN_FLIGHT).values()) == {0}


@pytest.mark.long
def test_a_replica_is_shown_with_its_machines(pair: MachinesFleet) -> None:
    with pair.head.http(10) as client:
        shown = [replica["machines"] for replica in replicas(client).values()]
    assert shown == [pair.layout.shown] * pair.layout.replicas


@pytest.mark.parametrize(
    "part",
    [
        "other machine",
        pytest.param("first machine", marks=pytest.mark.long),
        pytest.param("of both", marks=pytest.mark.long),
    ],
)
def test_a_killed_process_ends_the_replica_and_all_meet_again(pair: MachinesFleet, texts: list[str], part: str) -> None:
    old = [process for rank, name in pair.layout.parts.values() for process in pair.processes(rank, name)]
    with streams(pair, texts):
        (process,) = pair.processes(*pair.layout.parts[part])
        process.kill()
        until(lambda: not any(each.is_running() for each in old), "nothing is left of the old meeting")


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_sigterm_to_the_other_machine_lets_streams_finish_first(pair: MachinesFleet, texts: list[str]) -> None:
    with streams(pair, texts):
        pair.nodes[OTHER].process.send_signal(signal.SIGTERM)
        assert pair.nodes[OTHER].process.wait(60) == 0
        assert pair.nodes[FIRST].process.wait(60) == 0
        for rank in (FIRST, OTHER):
            pair.nodes[rank] = pair.start_machine(rank)
