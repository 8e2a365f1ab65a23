"""Where sockets lie, and what becomes of those of a process that was killed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni_plugin.replicas.engine.socket_folder import sweep

OWNER = (
    "import os, sys\n"
    "from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address, use_socket_folder\n"
    "use_socket_folder()\n"
    "use_socket_folder()\n"
    "path = new_ipc_address().removeprefix('ipc://')\n"
    "open(path, 'w').close()\n"
    "print(path, flush=True)\n"
    "sys.stdin.read()\n"
)


class Owner:
    """A process with a socket in a folder of its own. A context manager; leaving it ends the process in order."""

    def __init__(self, base: Path) -> None:
        environment = {**os.environ, "VLLM_RPC_BASE_PATH": str(base)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self.process.stdout is not None
        self.socket = Path(self.process.stdout.readline().decode().strip())

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_what_a_killed_process_leaves_is_swept_by_the_next(base: Path) -> None:
    with Owner(base) as killed:
        killed.process.kill()
        killed.process.wait()
    assert killed.socket.exists()
    with Owner(base) as following:
        assert not killed.socket.parent.exists()
        assert following.socket.exists()
    assert list(base.iterdir()) == []


def test_sockets_of_a_process_that_runs_are_left(base: Path) -> None:
    with Owner(base) as running:
        assert running.socket.parent.parent == base
        sweep(str(base))
        with Owner(base):
            assert running.socket.exists()


def test_only_folders_of_that_name_are_swept(base: Path) -> None:
    other = base / "other"
    other.mkdir()
    (other / "file").touch()
    (base / "omni-run-link").symlink_to(other)
    (base / "omni-run-file").touch()
    (base / "omni-run-left").mkdir()
    sweep(str(base))
    assert {path.name for path in base.iterdir()} == {"other", "omni-run-link", "omni-run-file"}
    assert (other / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_folders_of_others_are_left(base: Path) -> None:
    theirs = base / "omni-run-theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    sweep(str(base))
    assert theirs.exists()


def test_a_long_path_is_used_as_it_is(base: Path) -> None:
    long = base / ("x" * 60)
    long.mkdir()
    with Owner(long) as owner:
        assert owner.socket.parent == long
