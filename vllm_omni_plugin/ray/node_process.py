"""A headless node inside a Ray actor. It runs on the machine where Ray places the actor, and does not import Ray."""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_omni_plugin.integration.options.listening import address_towards
from vllm_omni_plugin.replicas.engine.reaper import Reaper
from vllm_omni_plugin.replicas.machines.first_machine import free_port


class ReplicaMachines(NamedTuple):
    """A replica over several `machines`. `head` is the address and port of its head."""

    machines: int
    head: tuple[str, int]


class NodeProcess:
    """One `vllm serve --headless`, which is killed when the process of this object ends.

    Its methods are called from several threads at once. Raises OSError if `vllm` is not in the folder of this Python.
    In a group it runs the machine `rank` of a replica; `first` is the `meeting_address` of that with rank 0.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        group: ReplicaMachines | None = None,
        rank: int = 0,
        first: tuple[str, int] | None = None,
    ) -> None:
        if group is not None:
            if first is None:
                here = address_towards(*group.head, "--omni-master-address")
                first = here, free_port(here)
            address, port = first
            place = {"nnodes": group.machines, "node-rank": rank, "master-addr": address, "master-port": port}
            arguments = [*arguments, *(word for name, value in place.items() for word in (f"--{name}", str(value)))]
        self._meeting_address = first
        # A child inherits blocked signals, and Ray 2.60 blocks SIGINT here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        command = [str(Path(sys.executable).with_name("vllm")), "serve", *arguments]
        self._reaper = Reaper()
        self._process = subprocess.Popen(command)
        self._reaper.watch(self._process.pid)

    def meeting_address(self) -> tuple[str, int] | None:
        """Where the machines of the replica meet."""
        return self._meeting_address

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
