"""`--data-parallel-size` behind the OpenAI server: every rank is a replica, a lockstep group lives and dies as one."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.fakes.free_ports import free_port

from .experts import RANKS, make_experts
from .load import Load
from .nodes import Node
from .server import START_S, Server, serve_command, until
from .test_shutdown import terminate

IN_FLIGHT = "vllm_omni_fleet:requests_in_flight"
SLOW = {"sleeping_executor": {"step_s": 0.01, "prefill_token_s": 0, "sequence_s": 0}}
EXPERTS = (
    "--data-parallel-size",
    str(RANKS),
    "--distributed-executor-backend",
    "tests.fakes.sleeping_executor.SleepingExecutor",
    "--additional-config",
    json.dumps(SLOW),
)
HEAD = ("--api-server-count", "1", "--omni-lb-policy", "least-queue-length")
NO_ENGINE = ("--omni-dp-size-local", "0")
LONG, SHORT = 400, 20
"""Tokens: of a request that still runs when something happens to its rank, and of one that is answered soon."""


@pytest.fixture(scope="module")
def experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_experts(tiny_model, tmp_path_factory.mktemp("experts") / "model")


@contextmanager
def groups(experts: Path, log: Path, count: int) -> Iterator[Server]:
    """A server with so many local groups, all of which serve."""
    with Server(experts, log, *EXPERTS, *HEAD, "--omni-dp-size-local", str(count)) as server:
        until(lambda: server.replicas_up() == count * RANKS, "all ranks serve", START_S)
        yield server


def in_flight(server: Server) -> dict[str, float]:
    return server.by_replica(IN_FLIGHT)


@pytest.mark.long
@pytest.mark.usefixtures("make_room")
def test_a_group_is_balanced_rank_by_rank_and_moves_its_requests_into_its_next_life(experts: Path, logs: Path) -> None:
    with groups(experts, logs / "group.log", 1) as server, Load(server) as load:
        expected = load.send(LONG, stream=True)
        load.wait()
        assert expected.finished_whole
        answers = [load.send(LONG, stream=True) for _ in range(6)]
        until(lambda: in_flight(server) == {"0": 3.0, "1": 3.0}, "each rank has half of the requests")
        for answer in answers:
            assert answer.started.wait(START_S)
        before = server.engine_pids()
        psutil.Process(before[1]).kill()
        load.wait()
        assert all(answer.finished_whole for answer in answers)
        assert {answer.text for answer in answers} == {expected.text}
        assert not set(before.values()) & set(server.engine_pids().values())
        code, left = terminate(server)
        assert (code, left) == (0, [])


@pytest.mark.long
@pytest.mark.usefixtures("make_room")
def test_a_rank_that_is_killed_takes_its_group_with_it_and_no_other(experts: Path, logs: Path) -> None:
    with groups(experts, logs / "two-groups.log", 2) as server, Load(server) as load:
        before = server.engine_pids()
        answers = [load.send(LONG, stream=True) for _ in range(8)]
        until(lambda: set(in_flight(server).values()) == {2.0}, "each of four ranks has two requests")
        psutil.Process(before[0]).kill()
        until(lambda: in_flight(server)["2"] == in_flight(server)["3"] == 4.0, "the other group has all of them")
        load.wait()
        assert all(answer.finished_whole for answer in answers)
        until(lambda: server.replicas_up() == 2 * RANKS, "the group serves again", START_S)
        after = server.engine_pids()
        assert {rank for rank, pid in before.items() if after[rank] == pid} == {2, 3}


@pytest.mark.long
@pytest.mark.usefixtures("make_room")
def test_a_group_of_another_node_serves_a_head_and_comes_back(experts: Path, logs: Path) -> None:
    join = ("-oma", "127.0.0.1", "-omp", str(free_port()))
    node = Node(serve_command(experts, "--headless", *join, *EXPERTS), logs / "group-node.log")
    try:
        with Server(experts, logs / "group-head.log", *join, *HEAD, *NO_ENGINE) as head:
            until(lambda: head.replicas_up() == RANKS, "both ranks serve", START_S)
            with Load(head) as load:
                answers = [load.send(LONG, stream=True) for _ in range(4)]
                until(lambda: set(in_flight(head).values()) == {2.0}, "each rank has half of the requests")
                node.engine.kill()
                load.wait()
                assert all(answer.finished_whole for answer in answers)
                started = psutil.Process(node.process.pid).children(recursive=True)
                last = load.send(LONG, stream=True)
                assert last.started.wait(START_S)
                node.process.send_signal(signal.SIGTERM)
                load.wait()
                assert last.finished_whole
            assert node.process.wait(START_S) == 0
            assert psutil.wait_procs(started, timeout=START_S)[1] == []
    finally:
        node.stop()


@pytest.mark.long
@pytest.mark.usefixtures("make_room")
def test_ranks_of_a_dense_model_are_replicas_that_have_nothing_in_common(tiny_model: Path, logs: Path) -> None:
    flags = ("--data-parallel-size", "2", "--omni-dp-size-local", "1", *HEAD)
    with Server(tiny_model, logs / "dense.log", *flags) as server, Load(server) as load:
        assert server.replicas_up() == 2
        answers = [load.send(LONG, stream=False, temperature=0) for _ in range(6)]
        until(lambda: in_flight(server) == {"0": 3.0, "1": 3.0}, "each has half of the requests")
        load.wait()
        assert all(answer.finished_whole for answer in answers)
        assert len({answer.text for answer in answers}) == 1
        assert set(server.by_engine("vllm:generation_tokens_total").values()) == {3.0 * LONG}
        before = server.engine_pids()
        psutil.Process(before[1]).kill()
        until(lambda: server.replicas_up() == 1, "the loss is noticed")
        assert load.send(SHORT, stream=False).errors == []
        until(lambda: server.replicas_up() == 2, "it serves again", START_S)
        assert server.engine_pids()[0] == before[0]
