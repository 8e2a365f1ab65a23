"""Kills the engines of a process that was killed. A child process does it, which outlives its parent by a moment.

Engines survive the death of their parent. The child, ``python -m vllm_omni_plugin.replicas.engine.reaper``, gets their
process ids on its standard input. When its parent has ended, it kills each engine with all its descendants. It holds a
pidfd of every engine, so it never kills another process that got the same id. It does not import vLLM.
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

from vllm_omni_plugin.vllm_api.launch.leftovers import kill_marked, unmarked_environment

KILL_TIMEOUT_S = 5.0
_CLOSED = b"closed"
"""The last line of a parent that goes on."""


class Reaper:
    """Starts the child with the first engine, and sends it process ids. Must be closed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pids: list[int] = []
        self._closed = False

    def watch(self, pid: int) -> None:
        """Kill this child process and its descendants if it outlives this process or `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the reaper is closed")
            self._pids.append(pid)
            added = [pid]
            if self._child is None or self._child.poll() is not None:
                # A new child gets all process ids except those that may belong to other processes by now.
                self._end_child()
                current = _children(os.getpid())
                self._child, added = self._start(), [each for each in self._pids if each in current]
            assert self._child.stdin is not None
            # A child that ends at this moment is replaced at the next call.
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.write(b"".join(b"%d\n" % each for each in added))

    def close(self) -> None:
        """Kill the watched processes that still run, and wait for their end. Idempotent."""
        with self._lock:
            self._closed = True
            self._end_child()

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.communicate(_CLOSED + b"\n")

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid())],
            env=unmarked_environment(),
            stdin=subprocess.PIPE,
            bufsize=0,
            # A new session, so that a signal from the terminal does not end it before the engines.
            start_new_session=True,
        )


class _Watched:
    """In the child: the watched processes by pidfd."""

    def __init__(self, parent: int, parent_has_ended: Callable[[], bool]) -> None:
        self._parent = parent
        self._parent_has_ended = parent_has_ended
        self._pids: dict[int, int] = {}

    def add(self, pid: int) -> None:
        """Watch a process if it exists and is a child of the parent, or if the parent has ended."""
        for fd in [fd for fd in self._pids if _has_exited(fd)]:
            del self._pids[fd]
            os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            if pid in _children(self._parent) or self._parent_has_ended():
                self._pids[fd] = pid
            else:
                os.close(fd)

    def kill(self) -> None:
        """Kill engines with all they started; after the parent's end also workers whose engine had ended before."""
        for fd, pid in self._pids.items():
            _kill_tree(pid, fd)
        if self._parent_has_ended():
            kill_marked(f"/proc/{self._parent}/fd/")
        deadline = time.monotonic() + KILL_TIMEOUT_S
        for fd in self._pids:
            select.select([fd], [], [], max(0.0, deadline - time.monotonic()))


def main() -> None:
    """Kill the processes on standard input, one id per line, when the input or the parent (first argument) ends."""
    parent = int(sys.argv[1])
    stdin = sys.stdin.fileno()
    parent_fd = _open_parent(parent)
    watched = _Watched(parent, lambda: parent_fd is None or _has_exited(parent_fd))
    unfinished, is_closed = b"", False
    while True:
        # The end of standard input is not enough: another child of the parent may hold a copy of the pipe.
        sources = [stdin] if parent_fd is None else [stdin, parent_fd]
        # If the parent has ended, read only what is in the pipe.
        readable, _, _ = select.select(sources, [], [], None if parent_fd is not None else 0)
        if stdin not in readable:
            break
        chunk = os.read(stdin, 4096)
        if not chunk:
            break
        *lines, unfinished = (unfinished + chunk).split(b"\n")
        for line in lines:
            if line == _CLOSED:
                is_closed = True
            else:
                watched.add(int(line))
    if parent_fd is not None and not is_closed:
        # The files of a killed process are closed a moment before it has ended.
        select.select([parent_fd], [], [], KILL_TIMEOUT_S)
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
        # Stopped first, so that it cannot start further processes.
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
        # The program name in parentheses may contain anything; state and parent id follow it (proc(5)).
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


if __name__ == "__main__":
    main()
