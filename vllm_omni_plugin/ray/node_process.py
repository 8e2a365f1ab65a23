"""A headless node inside a Ray actor. It runs on the machine where Ray places the actor, and does not import Ray."""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_omni_plugin.replicas.engine.reaper import Reaper


class NodeProcess:
    """One `vllm serve --headless`, which is killed when the process of this object ends.

    Its methods are called from several threads at once. Raises OSError if `vllm` is not in the folder of this Python.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        # A child inherits blocked signals, and Ray 2.60 blocks SIGINT here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        command = [str(Path(sys.executable).with_name("vllm")), "serve", *arguments]
        self._reaper = Reaper()
        self._process = subprocess.Popen(command)
        self._reaper.watch(self._process.pid)

    def host(self) -> str:
        return socket.gethostname()

    def wait(self) -> int:
        """Wait for the end of the node. Returns its exit code, negative for a signal."""
        code = self._process.wait()
        self._reaper.close()
        return code

    def end(self) -> None:
        """Make the node finish its requests and end. A second call makes it move them to other nodes."""
        self._process.terminate()
