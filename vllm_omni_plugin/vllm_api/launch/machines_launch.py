"""An engine over several machines (`--nnodes`): its core and workers on the first one, workers on the others."""

import multiprocessing
import os
import select
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from vllm_omni_plugin.vllm_api.launch.engine_identity import set_identity
from vllm_omni_plugin.vllm_api.launch.engine_launch import EngineLauncher, replica_config
from vllm_omni_plugin.vllm_api.launch.fleet_engine import ExitNote, FleetExecutor, mark_as_fleet_engine
from vllm_omni_plugin.vllm_api.launch.leftovers import kill_marked, remove_memory
from vllm_omni_plugin.vllm_api.launch.spawning import SPAWN_LOCK, describe_exit

_DEATH_S = 5.0
"""Limit of the wait for a killed process, which may be stuck in the kernel."""


def use_network_of(address: str) -> None:
    """Make vLLM and gloo use the network with this address of the machine, unless the user has chosen another.

    vLLM takes the route to a public address, and gloo what the hostname resolves to, often loopback.
    """
    os.environ.setdefault("VLLM_HOST_IP", address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def layout(vllm_config: Any) -> dict[str, str]:
    """How an engine is divided, as text for operators."""
    parallel = vllm_config.parallel_config
    return {
        "--nnodes": str(parallel.nnodes),
        "--tensor-parallel-size": str(parallel.tensor_parallel_size),
        "--pipeline-parallel-size": str(parallel.pipeline_parallel_size),
        "--prefill-context-parallel-size": str(parallel.prefill_context_parallel_size),
        "--decode-context-parallel-size": str(parallel.decode_context_parallel_size),
        "--data-parallel-size": str(parallel.data_parallel_size),
        "--enable-expert-parallel": str(parallel.enable_expert_parallel),
        "--max-num-batched-tokens": str(vllm_config.scheduler_config.max_num_batched_tokens),
        "--max-num-seqs": str(vllm_config.scheduler_config.max_num_seqs),
        "--block-size": str(vllm_config.cache_config.block_size),
        "--enforce-eager": str(vllm_config.model_config.enforce_eager),
    }


class OverMachines(EngineLauncher):
    """What a `replicas.machines.meeting_host.LauncherOverMachines` tells of the machines."""

    @property
    def machines(self) -> int:
        return int(self.vllm_config.parallel_config.nnodes)

    @property
    def meeting_address(self) -> tuple[str, int]:
        parallel = self.vllm_config.parallel_config
        return parallel.master_addr, parallel.master_port

    @property
    def layout(self) -> Mapping[str, str]:
        return layout(self.vllm_config)


@dataclass(eq=False)
class MachinesLauncher(OverMachines):
    """Starts the engine of the only replica of its node, or on another machine than the first one its workers."""

    def __post_init__(self) -> None:
        self._port = 0

    def next_start(self, replica_id: int) -> tuple[int, int]:
        return self.numbers[replica_id], self.first_incarnation + self._starts[replica_id]

    def meet_at(self, port: int) -> None:
        self._port = port

    def _set_identity(self, config: Any, replica_id: int) -> None:
        super()._set_identity(config, replica_id)
        config.parallel_config.master_port = self._port

    def start_workers(self, number: int, incarnation: int, port: int) -> "WorkersProcess":
        """Start this machine's workers of the engine with this identity, on a machine that is not the first one."""
        config = replica_config(self.vllm_config, 0)
        # All workers of an engine must have the same seed. What follows is done by the engine's core on its machine.
        set_identity(config, number, incarnation)
        config.parallel_config.reconfigure_for_independent_dp_rank()
        config.parallel_config.data_parallel_index = number
        config.parallel_config.master_port = port
        return WorkersProcess(config, self.on_spawn)


class WorkersProcess:
    """A process that starts the workers of one machine, and ends with them."""

    def __init__(self, config: Any, on_spawn: Callable[[int], None]) -> None:
        self._note = ExitNote()
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_workers, args=(config,), name="OmniWorkers"
        )
        with SPAWN_LOCK, mark_as_fleet_engine(self._note):
            self._process.start()
        self.sentinel = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self.sentinel)
        on_spawn(self.pid)

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def exit_reason(self) -> str:
        self._process.join(0)
        return self._note.read() or f"the process of its workers {describe_exit(self._process.exitcode)}"

    def end(self) -> None:
        """Kill it and its workers. Blocks until it has ended; idempotent."""
        self._process.kill()
        select.select([self.sentinel], [], [], _DEATH_S)
        remove_memory(kill_marked(str(self._note.path)))


def run_workers(config: Any) -> None:
    """Start the workers of this machine; the process exits when one of them does."""
    # A signal from the terminal is for the node, which lets the requests finish first.
    os.setsid()
    FleetExecutor(config, monitor_workers=False).wait_for_exit()
    # At once, since the first machine ends the engine for this reason only if it learns it in time. Workers that are
    # left are killed.
    os._exit(1)
