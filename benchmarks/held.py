"""What the processes of a fleet hold: memory, threads, descriptors, sockets, tasks, and files in a folder."""

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).with_name("startup")))

from alive_counts import VARIABLE, address, count

__all__ = ["COUNTING", "child_of", "count", "descendants", "entries", "held_by", "in_shared_memory"]

COUNTING = {VARIABLE: "1"}
"""Environment of the Python processes that can be looked at."""

_NOT_OURS = ("torchinductor_", "vllm_dist_")
_KIBI = 1024
_PATIENCE_S = 30.0


def held_by(pid: int, python: bool = True) -> dict[str, float]:
    """What a process holds now, by family.

    `memory_mib` is anonymous memory, `shared_mib` shared memory that it has touched; `tasks` and `objects` are those of
    Python that were made after its start and are alive.

    Args:
        pid: its id.
        python: whether it counts what is alive in it.

    Raises:
        OSError: it has ended, or does not count what is alive in it.
    """
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    targets = list(_targets(pid))
    return {
        "memory_mib": float(status["RssAnon"].split()[0]) / _KIBI,
        "shared_mib": float(status["RssShmem"].split()[0]) / _KIBI,
        "threads": float(status["Threads"]),
        "descriptors": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        **(_alive_in(pid) if python else {}),
    }


def child_of(pid: int, word: str) -> psutil.Process:
    """The descendant of a process whose command line has this word. Raises LookupError if there is none."""
    for child in psutil.Process(pid).children(recursive=True):
        if any(word in argument for argument in child.cmdline()):
            return child
    raise LookupError(f"process {pid} has no child for {word}")


def descendants(pid: int) -> int:
    """How many processes a process has started, and those have, that are alive."""
    return len(psutil.Process(pid).children(recursive=True))


def entries(folder: Path) -> list[str]:
    """Files, sockets and folders below a folder, but for torch's and those that killed engines of vLLM leave."""
    found = (Path(place, name) for place, folders, files in os.walk(folder) for name in (*folders, *files))
    return [str(path) for path in found if not path.relative_to(folder).parts[0].startswith(_NOT_OURS)]


def in_shared_memory(folder: Path = Path("/dev/shm")) -> set[str]:
    """Names of this user's files there, of whichever process."""
    names = set()
    for path in folder.iterdir():
        try:
            if path.lstat().st_uid == os.getuid():
                names.add(path.name)
        except FileNotFoundError:
            continue
    return names


def _targets(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield str(descriptor.readlink())
        except FileNotFoundError:
            continue


def _alive_in(pid: int) -> dict[str, float]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PATIENCE_S)
        connection.connect(address(pid))
        with connection.makefile("rb") as answer:
            counts: dict[str, float] = json.load(answer)
    return counts
