"""A headless node inside a Ray actor. Runs on the machine where Ray places it, and needs no Ray itself."""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_omni_plugin.replicas.engine.reaper import Reaper


class NodeProcess:
    """One `vllm serve --headless`, which does not outlive the process that this object is in.

    Its methods are called from several threads at once. What the node writes goes where this process writes.

    Args:
        arguments: those of `vllm serve`.

    Raises:
        OSError: there is no `vllm` beside this Python.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        # A process inherits which signals are blocked. Ray 2.60 blocks SIGINT here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        command = [str(Path(sys.executable).with_name("vllm")), "serve", *arguments]
        self._reaper = Reaper()
        self._process = subprocess.Popen(command)
        self._reaper.watch(self._process.pid)

    def host(self) -> str:
        """The name of this machine."""
        return socket.gethostname()

    def wait(self) -> int:
        """Wait until the node has ended; returns its exit code, negative for a signal."""
        code = self._process.wait()
        self._reaper.close()
        return code

    def end(self) -> None:
        """Tell the node to finish what it has and end; told again, what it has moves to other nodes."""
        self._process.terminate()
