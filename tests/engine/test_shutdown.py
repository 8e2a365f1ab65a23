"""SIGTERM: everything the server started ends with it, whatever state that was in, as with plain vLLM."""

import signal
from pathlib import Path

import psutil
import pytest

from .conftest import TWO_REPLICAS
from .server import START_S, STOP_S, Server, until
from .servers import Servers


@pytest.fixture
def doomed(servers: Servers, tiny_model: Path, request: pytest.FixtureRequest) -> Server:
    """A fleet of two for the test that asks, which ends it."""
    return servers.get(f"doomed-{request.node.name}", tiny_model, *TWO_REPLICAS, engines=2)


def terminate(server: Server) -> tuple[int, list[psutil.Process]]:
    """SIGTERM the server and wait for its end: its exit code, and which of the processes it had started are left."""
    started = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(STOP_S)
    _, left = psutil.wait_procs(started, timeout=STOP_S)
    return code, left


@pytest.mark.long
def test_sigterm_ends_all_processes_with_the_exit_code_of_plain_vllm(
    doomed: Server, servers: Servers, tiny_model: Path
) -> None:
    assert terminate(doomed) == terminate(servers.get("doomed-plain", tiny_model, engines=1))


@pytest.mark.long
def test_sigterm_while_an_engine_starts_again_leaves_no_process_behind(doomed: Server) -> None:
    before = doomed.engine_pids()
    psutil.Process(before[1]).kill()
    until(lambda: doomed.replicas_up() == 1, "the loss is noticed")
    head = psutil.Process(doomed.process.pid)
    old = {child.pid for child in head.children()}
    until(lambda: {child.pid for child in head.children()} - old, "its engine starts again", START_S)
    code, left = terminate(doomed)
    assert left == []
    assert code == 0
