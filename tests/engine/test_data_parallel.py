"""`--data-parallel-size` behind the OpenAI server: every rank is a replica, a lockstep group lives and dies as one."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.fakes.free_ports import free_port

from .experts import RANKS
from .load import Load
from .nodes import Node
from .server import IN_FLIGHT, START_S, Server, serve_command, until
from .test_shutdown import terminate

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
LONG = 400
"""Tokens of a request that still runs when something happens to its rank."""


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("make_room")]


def in_flight(server: Server) -> dict[str, float]:
    return server.by_replica(IN_FLIGHT)


def test_a_rank_that_is_killed_takes_its_group_with_it_and_no_other(experts: Path, logs: Path) -> None:
    with (
        Server(experts, logs / "groups.log", *EXPERTS, *HEAD, "--omni-dp-size-local", "2") as server,
        Load(server) as load,
    ):
        until(lambda: server.replicas_up() == 2 * RANKS, "all ranks serve", START_S)
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
        assert terminate(server) == (0, [])


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
