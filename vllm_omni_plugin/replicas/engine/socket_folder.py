"""A folder for the ipc sockets of one process and its engines, so that the sockets of a killed process are removed.

vLLM creates sockets in `VLLM_RPC_BASE_PATH` under random names, and a process that is killed leaves them behind. A
process locks its folder while it runs. The next process of the same user removes all folders that are not locked.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

_BASE_PATH = "VLLM_RPC_BASE_PATH"
_PREFIX = "omni-run-"
LONGEST_BASE = 107 - len(f"/{uuid4()}-tcp:0")
"""Limit for paths of unix sockets, see unix(7)."""
LONGEST_BASE_OF_FOLDERS = LONGEST_BASE - len(f"/{_PREFIX}abcdefgh")
_ATTEMPTS = 3


def new_ipc_address() -> str:
    """An address that nobody uses. Makes this process's folder again if something has removed it meanwhile."""
    folder = Path(socket_base())
    if folder.name.startswith(_PREFIX):
        with suppress(FileExistsError):
            folder.mkdir(0o700)
            _lock(folder)
    return f"ipc://{folder}/{uuid4()}"


def socket_base() -> str:
    """The folder of this process's sockets, or its parent. Raises `FileNotFoundError` if no such folder is writable."""
    return os.environ.get(_BASE_PATH) or tempfile.gettempdir()


@cache
def use_socket_folder() -> None:
    """Create a folder for the sockets of this process and its future child processes.

    It is removed when this process exits normally. If the path would be too long for sockets, no folder is created.
    """
    base = socket_base()
    sweep(base)
    if len(base) > LONGEST_BASE_OF_FOLDERS:
        return
    for _ in range(_ATTEMPTS):
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError:
            # No socket can be created there either; that error will name the path.
            return
        # The lock is held until this process ends. If it fails, another process is removing the folder right now.
        if _lock(folder) is not None:
            break
    atexit.register(_remove_at_exit, folder, os.getpid())
    os.environ[_BASE_PATH] = str(folder)


def sweep(base: str) -> None:
    """Remove the folders of this user whose processes have ended."""
    with suppress(OSError):
        for folder in list(Path(base).glob(f"{_PREFIX}*")):
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder of this user; returns its descriptor, or None if it is locked, missing or not such a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid == os.geteuid() and os.path.samestat(os.fstat(descriptor), os.lstat(folder)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove_at_exit(folder: Path, owner: int) -> None:
    # A fork of this process runs its exit handlers too.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
