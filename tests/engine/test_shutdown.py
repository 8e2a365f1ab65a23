"""SIGTERM: everything the server started ends with it, whatever state that was in, as with plain vLLM."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .conftest import TWO_REPLICAS
from .load import Load
from .server import FRONT_ENDS, START_S, STOP_S, Server, until
from .servers import Servers

LONG_STREAMS = 32
LONG_TOKENS = 3800
"""So many take longer than vLLM gives engines to exit, on a fast machine, too."""
LONG_MODEL = ("--max-model-len", "4096")
VLLM_GRACE_S = 5.0


pytestmark = pytest.mark.both_front_ends


@pytest.fixture
def doomed(servers: Servers, tiny_model: Path, request: pytest.FixtureRequest, front_end: str) -> Server:
    """A fleet of two for the test that asks, which ends it."""
    name, environment = f"doomed-{request.node.name}", FRONT_ENDS[front_end]
    return servers.get(name, tiny_model, *TWO_REPLICAS, *LONG_MODEL, engines=2, **environment)


def terminate(server: Server) -> tuple[int, list[psutil.Process]]:
    """SIGTERM the server and wait for its end: its exit code, and which of the processes it had started are left."""
    started = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(STOP_S)
    _, left = psutil.wait_procs(started, timeout=STOP_S)
    return code, left


@pytest.mark.long
def test_sigterm_ends_all_processes_with_the_exit_code_of_plain_vllm(
    doomed: Server, servers: Servers, tiny_model: Path, front_end: str
) -> None:
    plain = servers.get(f"doomed-plain-{front_end}", tiny_model, engines=1, **FRONT_ENDS[front_end])
    assert terminate(doomed) == terminate(plain)


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


@pytest.mark.long
@pytest.mark.parametrize("tell", [pytest.param(os.kill, id="alone"), pytest.param(os.killpg, id="with-its-engines")])
def test_streams_finish_before_their_engines_end(doomed: Server, tell: Callable[[int, int], None]) -> None:
    """Ctrl-C in a terminal, and some service managers, tell all processes."""
    with Load(doomed) as load:
        streams = [load.send(LONG_TOKENS, stream=True) for _ in range(LONG_STREAMS)]
        assert all(stream.started.wait(60) for stream in streams)
        tell(doomed.process.pid, signal.SIGTERM)
        told_at = time.monotonic()
        load.wait()
        took = time.monotonic() - told_at
    assert [stream for stream in streams if not stream.finished_whole] == []
    assert took > VLLM_GRACE_S, "they are to need longer than vLLM gives engines to exit"
    assert doomed.process.wait(STOP_S) == 0
