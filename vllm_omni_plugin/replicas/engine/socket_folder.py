"""A folder of its own for the ipc sockets of a process and its engines, so that no file of theirs is left for ever.

vLLM puts sockets where `VLLM_RPC_BASE_PATH` says, under names that tell nothing, and a process that is killed removes
none. The folder is locked while its owner lives; the next owner of the same user removes those that are not.
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
"""For paths of unix sockets, see unix(7)."""
LONGEST_BASE_OF_FOLDERS = LONGEST_BASE - len(f"/{_PREFIX}abcdefgh")
_ATTEMPTS = 3


def new_ipc_address() -> str:
    """A fresh ipc address where vLLM puts its own."""
    return f"ipc://{socket_base()}/{uuid4()}"


def socket_base() -> str:
    """Where sockets of this process, or their folder, lie.

    Raises:
        FileNotFoundError: no temporary folder can be written to.
    """
    return os.environ.get(_BASE_PATH) or tempfile.gettempdir()


@cache
def use_socket_folder() -> None:
    """Let sockets of this process, and of those that it starts from here on, lie in a folder of their own.

    It is removed when this process ends in order. Not used where that would make paths too long for sockets.
    """
    base = socket_base()
    sweep(base)
    if len(base) > LONGEST_BASE_OF_FOLDERS:
        return
    for _ in range(_ATTEMPTS):
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError:
            # No socket can be made there either, and what is said of that names the path.
            return
        # Held until this process ends, however that happens. Otherwise somebody sweeps at this very moment.
        if _lock(folder) is not None:
            break
    atexit.register(_remove, folder, os.getpid())
    os.environ[_BASE_PATH] = str(folder)


def sweep(base: str) -> None:
    """Remove the folders of this user whose owners have ended."""
    with suppress(OSError):
        for folder in list(Path(base).glob(f"{_PREFIX}*")):
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds a folder of this user; None if another process does, or it is gone or no such folder."""
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


def _remove(folder: Path, owner: int) -> None:
    # A fork of this process may end in order, too.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
