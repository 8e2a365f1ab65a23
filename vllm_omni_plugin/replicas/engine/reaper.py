"""Ends the engines of a process that was killed: a child process of its own, which outlives its owner by a moment.

Engines survive the death of whoever started them. The child, ``python -m vllm_omni_plugin.replicas.engine.reaper``, is
told their process ids on its standard input; when the owner has gone it kills each of them with all its descendants. It
holds a descriptor of every process, so that a number that has gone to another process meanwhile is never touched. Needs
the standard library only.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_DEATH_TAKES_AT_MOST_S = 5.0


class Reaper:
    """The owner's end. To be closed; the child starts with the first engine. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pids: list[int] = []
        self._closed = False

    def watch(self, pid: int) -> None:
        """Have a child process of this one killed, with its descendants, if it outlives this one or `close`.

        Raises:
            RuntimeError: the reaper is closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the reaper is closed")
            self._pids.append(pid)
            news = [pid]
            if self._child is None or self._child.poll() is not None:
                # In place of one that has ended. It is told of all but those whose number may be another's by now.
                self._end_child()
                ours = _children(os.getpid())
                self._child, news = self._start(), [each for each in self._pids if each in ours]
            assert self._child.stdin is not None
            # A child that ends at this moment is replaced with the next process to be watched.
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.write(b"".join(b"%d\n" % each for each in news))

    def close(self) -> None:
        """Kill what still runs of the watched processes and wait for that. Idempotent."""
        with self._lock:
            self._closed = True
            self._end_child()

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.communicate()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            bufsize=0,
            # A session of its own, so that no signal from a terminal ends it before the engines it is there for.
            start_new_session=True,
        )


class _Watched:
    """The child's end: processes by descriptor."""

    def __init__(self, owner: int, owner_has_gone: Callable[[], bool]) -> None:
        self._owner = owner
        self._owner_has_gone = owner_has_gone
        self._pids: dict[int, int] = {}

    def add(self, pid: int) -> None:
        """Watch a process, if it is there and the owner's child. Of an owner that has gone nobody is the child."""
        for fd in [fd for fd in self._pids if _has_exited(fd)]:
            del self._pids[fd]
            os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            if pid in _children(self._owner) or self._owner_has_gone():
                self._pids[fd] = pid
            else:
                os.close(fd)

    def kill(self) -> None:
        """Kill all with their descendants and wait until they have ended."""
        for fd, pid in self._pids.items():
            _kill_tree(pid, fd)
        deadline = time.monotonic() + _DEATH_TAKES_AT_MOST_S
        for fd in self._pids:
            select.select([fd], [], [], max(0.0, deadline - time.monotonic()))


def main() -> None:
    """Kill the processes named on standard input, a line each, when it ends or when the owner (first argument) does."""
    owner = int(sys.argv[1])
    stdin = sys.stdin.fileno()
    owner_fd = _open_parent(owner)
    watched = _Watched(owner, lambda: owner_fd is None or _has_exited(owner_fd))
    unfinished = b""
    while True:
        # Beside the end of standard input, because another child of the owner may hold a copy of its other end.
        sources = [stdin] if owner_fd is None else [stdin, owner_fd]
        # What is in the pipe of an owner that has gone is all there will be.
        readable, _, _ = select.select(sources, [], [], None if owner_fd is not None else 0)
        if stdin not in readable:
            break
        chunk = os.read(stdin, 4096)
        if not chunk:
            break
        *lines, unfinished = (unfinished + chunk).split(b"\n")
        for line in lines:
            watched.add(int(line))
    watched.kill()


def _open_parent(pid: int) -> int | None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    return fd if os.getppid() == pid else None


def _has_exited(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def _kill_tree(pid: int, fd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        # Stopped first, so that it starts nothing that would be missed.
        signal.pidfd_send_signal(fd, signal.SIGSTOP)
        for child in _children(pid):
            with contextlib.suppress(ProcessLookupError):
                child_fd = os.pidfd_open(child)
                if child in _children(pid):
                    _kill_tree(child, child_fd)
        signal.pidfd_send_signal(fd, signal.SIGKILL)


def _children(pid: int) -> set[int]:
    return {int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if _parent(stat) == pid}


def _parent(stat: Path) -> int | None:
    try:
        # The name of the program, in parentheses, may hold anything; after it come state and parent (proc(5)).
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


if __name__ == "__main__":
    main()
