"""One of several API server processes: vLLM's own worker, in which AsyncLLM finds a fleet to join."""

import argparse
import multiprocessing
import signal
import socket
from collections.abc import Callable, MutableSequence
from multiprocessing.process import BaseProcess
from typing import Any

from prometheus_client import multiprocess
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.admission_control import SharedAdmissionStats
from vllm.v1.utils import run_api_server_worker_proc

from vllm_omni_plugin.integration.command_line import read_our_flags
from vllm_omni_plugin.integration.options.carried_options import DRAIN_FLAG
from vllm_omni_plugin.integration.processes.api_servers import NOT_ACCEPTING
from vllm_omni_plugin.vllm_api.launch.spawning import SPAWNING

_SLOT = SharedAdmissionStats.COUNTERS_PER_SLOT


class ApiServerProcesses:
    """Starts API server processes that share one socket, and what they tell each other by memory.

    Args:
        count: how many there are.
        listen_address: where they listen, for their logs.
        listening: the socket.
        args: the parsed command line that each shall have.
        on_spawn: told the process id of each.

    Attributes:
        connections: how many each has open; see `ApiServers`.
        admitted: what each counts for vLLM's `--max-num-queued-reqs`, whose limit is that of all together.
    """

    def __init__(
        self,
        count: int,
        listen_address: str,
        listening: socket.socket,
        args: argparse.Namespace,
        on_spawn: Callable[[int], None],
    ) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._listening = listen_address, listening
        self._args = args
        self._on_spawn = on_spawn
        self.connections: MutableSequence[int] = self._context.RawArray("i", [NOT_ACCEPTING] * count)
        self._drained: MutableSequence[int] = self._context.RawArray("b", 1)
        self.admitted: MutableSequence[int] = self._context.RawArray("q", SharedAdmissionStats.num_counters(count))

    def start(self, index: int) -> BaseProcess:
        """Start the process with this number; not while it has one."""
        client_config = {
            "client_count": len(self.connections),
            "client_index": index,
            "api_server_loads": self.connections,
        }
        if getattr(self._args, "max_num_queued_reqs", None) is not None:
            client_config["mp_admission_counters"] = self.admitted
        process = self._context.Process(
            target=_serve, name=f"ApiServer_{index}", args=(*self._listening, self._args, client_config, self._drained)
        )
        with SPAWNING:
            process.start()
        assert process.pid is not None
        self._on_spawn(process.pid)
        return process

    def forget(self, index: int, pid: int) -> None:
        """Take back what a process that has ended counted for all."""
        self.admitted[index * _SLOT] = 0
        multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _serve(
    listen_address: str,
    listening: socket.socket,
    args: argparse.Namespace,
    client_config: Any,
    drained: MutableSequence[int],
) -> None:
    # From a terminal it comes to all; the supervisor says when. The server heeds it again from its start on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setattr(args, DRAIN_FLAG, drained)
    read_our_flags(EngineArgs)
    run_api_server_worker_proc(listen_address, listening, args, client_config)
