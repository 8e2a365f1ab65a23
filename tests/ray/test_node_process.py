"""The node process inside an actor, with a fake `vllm`."""

import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.server import until
from vllm_omni_plugin.ray.node_process import NodeProcess, ReplicaMachines

WAIT_S = 20.0
ENDED = 3
# No shell, since a shell unblocks signals.
VLLM = f"""\
#!{sys.executable}
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit({ENDED}))
with open(os.environ["NODE_FILE"] + ".new", "w") as file:
    file.write(" ".join([str(os.getpid()), *sys.argv[1:]]))
os.rename(file.name, os.environ["NODE_FILE"])
while True:
    signal.pause()
"""
OWNER = """\
import sys
from vllm_omni_plugin.ray.node_process import NodeProcess
sys.executable = sys.argv[1]
node = NodeProcess(["MODEL"])
print("started", flush=True)
node.wait()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter with a `vllm` beside it."""
    for name, text in (("vllm", VLLM), ("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path / "python"


@pytest.fixture
def node_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake writes its process id and arguments once it handles SIGTERM."""
    monkeypatch.setenv("NODE_FILE", str(tmp_path / "node_file"))
    return tmp_path / "node_file"


def test_a_node_ends_on_sigterm_even_if_its_thread_blocks_signals(
    python: Path, node_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(python))

    def start() -> NodeProcess:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        return NodeProcess(["MODEL", "--headless"])

    with ThreadPoolExecutor(2) as threads:
        node = threads.submit(start).result(WAIT_S)
        ended = threads.submit(node.wait)
        until(node_file.exists, "it runs", WAIT_S)
        pid, *arguments = node_file.read_text().split()
        assert arguments == ["serve", "MODEL", "--headless"]
        try:
            node.end()
            assert ended.result(WAIT_S) == ENDED
        finally:
            if not ended.done():
                os.kill(int(pid), signal.SIGKILL)


def test_the_machines_of_a_replica_get_its_first_address_and_their_ranks(
    python: Path, node_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(python))
    group = ReplicaMachines(2, ("127.0.0.1", 7500))
    first: tuple[str, int] | None = None
    for rank in range(2):
        node = NodeProcess(["MODEL"], group, rank, first)
        until(node_file.exists, "it runs", WAIT_S)
        _, *arguments = node_file.read_text().split()
        node_file.unlink()
        node.end()
        assert node.wait() == ENDED
        first = first or node.meeting_address()
        assert first is not None
        address, port = first
        assert address == "127.0.0.1"
        place = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", address, "--master-port", str(port)]
        assert arguments == ["serve", "MODEL", *place]


def test_a_node_does_not_outlive_a_killed_actor(python: Path, node_file: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, python], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"started\n"
        until(node_file.exists, "it runs", WAIT_S)
        fd = os.pidfd_open(int(node_file.read_text().split()[0]))
        owner.kill()
        assert select.select([fd], [], [], WAIT_S)[0]
        os.close(fd)


def test_a_machine_without_vllm_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(OSError, match="vllm"):
        NodeProcess(["MODEL"])
