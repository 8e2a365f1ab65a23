"""What the processes of an engine leave behind when its core is killed: workers, and the memory that they shared.

A worker ends with its core only if it looks at its death pipe, which it does not while it is stuck in a collective. Its
parent process is gone, so it is found by the mark of its engine in its environment.
"""

import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

from vllm_omni_plugin.config import FLEET_ENGINE

_SHARED_MEMORY = Path("/dev/shm")
_MAPPED = re.compile(rb" /dev/shm/(psm_\w+)$", re.MULTILINE)
"""multiprocessing gives such names to memory of vLLM's message queues, which has none of its own."""
_TRACKER = b"multiprocessing.resource_tracker"


def marked_processes(mark: str) -> dict[int, int]:
    """Processes whose `FLEET_ENGINE` is this path, or in this folder if it ends with "/": ids by descriptor (pidfd).

    Without those that remove shared memory when all others have ended, and those of containers inside this one, in
    which the path is of another process. Close the descriptors.
    """
    namespace = os.readlink("/proc/self/ns/pid")
    wanted, is_folder = f"{FLEET_ENGINE}={mark}".encode(), mark.endswith("/")
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        # A process may end meanwhile, or belong to another user.
        with suppress(OSError):
            fd = os.pidfd_open(int(name))
            process = Path("/proc", name)
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
                is_marked = os.readlink(process / "ns/pid") == namespace and any(
                    variable == wanted or (is_folder and variable.startswith(wanted)) for variable in environment
                )
                is_tracker = is_marked and _TRACKER in (process / "cmdline").read_bytes()
            except BaseException:
                os.close(fd)
                raise
            if is_marked and not is_tracker:
                found[fd] = int(name)
            else:
                os.close(fd)
    return found


def unmarked_environment() -> dict[str, str]:
    """The environment for a process that belongs to no engine; another thread may just be spawning one."""
    # Iterating reads the names first, and one of them may be deleted before its value is read.
    values = {name: os.environ.get(name) for name in os.environ if name != FLEET_ENGINE}
    return {name: value for name, value in values.items() if value is not None}


def kill_marked(mark: str) -> set[str]:
    """Kill the processes that `marked_processes` finds, and return their `mapped_memory`. Does not wait for ends."""
    memory: set[str] = set()
    for fd, pid in marked_processes(mark).items():
        memory |= mapped_memory(pid)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)
    return memory


def mapped_memory(pid: int) -> set[str]:
    """Names of the shared memory that a process has mapped; none if it has ended."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return set()
    return {name.decode() for name in _MAPPED.findall(maps)}


def remove_memory(names: Iterable[str]) -> None:
    """Remove shared memory that its owner, a child process of this one, has not removed."""
    for name in names:
        with suppress(FileNotFoundError):
            (_SHARED_MEMORY / name).unlink()
            # Child processes register their memory with the tracker of this process, which would remove it at its end.
            resource_tracker.unregister(f"/{name}", "shared_memory")
