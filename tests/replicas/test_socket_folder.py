"""Where sockets lie, and what becomes of those of a process that was killed."""

import os
import subprocess
import sys
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


def test_the_folder_of_a_killed_process_is_removed_by_the_next(short_path: Path) -> None:
    with Owner(short_path) as killed:
        killed.process.kill()
        killed.process.wait()
    assert killed.socket.exists()
    with Owner(short_path) as following:
        assert not killed.socket.parent.exists()
        assert following.socket.exists()
    assert list(short_path.iterdir()) == []


def test_the_folder_of_a_running_process_stays(short_path: Path) -> None:
    with Owner(short_path) as running:
        assert running.socket.parent.parent == short_path
        sweep(str(short_path))
        with Owner(short_path):
            assert running.socket.exists()


def test_a_folder_that_was_removed_while_its_process_runs_is_made_again_and_locked(short_path: Path) -> None:
    code = (
        "import shutil, sys\n"
        "from pathlib import Path\n"
        "from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address, sweep, use_socket_folder\n"
        "use_socket_folder()\n"
        "folder = Path(new_ipc_address().removeprefix('ipc://')).parent\n"
        "shutil.rmtree(folder)\n"
        "assert Path(new_ipc_address().removeprefix('ipc://')).parent == folder\n"
        "sweep(sys.argv[1])\n"
        "print(oct(folder.stat().st_mode))\n"
    )
    environment = {**os.environ, "VLLM_RPC_BASE_PATH": str(short_path)}
    command = [sys.executable, "-c", code, str(short_path)]
    assert subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout == "0o40700\n"
    assert list(short_path.iterdir()) == []


def test_only_folders_with_the_prefix_are_removed(short_path: Path) -> None:
    other = short_path / "other"
    other.mkdir()
    (other / "file").touch()
    (short_path / "omni-run-link").symlink_to(other)
    (short_path / "omni-run-file").touch()
    (short_path / "omni-run-left").mkdir()
    sweep(str(short_path))
    assert {path.name for path in short_path.iterdir()} == {"other", "omni-run-link", "omni-run-file"}
    assert (other / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_folders_of_other_users_stay(short_path: Path) -> None:
    theirs = short_path / "omni-run-theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    sweep(str(short_path))
    assert theirs.exists()


def test_a_long_base_path_gets_no_folder(short_path: Path) -> None:
    long = short_path / ("x" * 60)
    long.mkdir()
    with Owner(long) as owner:
        assert owner.socket.parent == long
