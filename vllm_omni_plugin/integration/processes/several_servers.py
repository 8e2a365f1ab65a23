"""`vllm serve --api-server-count N` with our flags: N API servers that join one fleet, and what they share."""

import argparse
import asyncio
import copy
import ipaddress
import multiprocessing
import signal
import socket
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import multiprocess
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.api_server.entry import setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.admission_control import SharedAdmissionStats
from vllm.v1.executor import Executor
from vllm.v1.metrics.prometheus import setup_multiprocess_prometheus
from vllm.v1.utils import run_api_server_worker_proc

from vllm_omni_plugin.admin.admin_keys import publish_local_key
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.curve import new_secret
from vllm_omni_plugin.integration.command_line import FLEET_ADDRESS, patch_engine_args
from vllm_omni_plugin.integration.fleet_setup.fleet import start_coordinator
from vllm_omni_plugin.integration.fleet_setup.stage_planning import StagePlan, own_numbers, stage_plans
from vllm_omni_plugin.integration.options.additional_config import LOCAL_ADMIN_KEY, SHARED_DRAIN_FLAG
from vllm_omni_plugin.integration.options.exit_status import exit_status_of
from vllm_omni_plugin.integration.options.listening import (
    bind_address,
    coordinator_address,
    engines_address,
    listen_for_clients,
    with_secret,
)
from vllm_omni_plugin.integration.processes.api_servers import NOT_ACCEPTING, ApiServerSupervisor, run_until_signal
from vllm_omni_plugin.integration.processes.headless import replica_servers
from vllm_omni_plugin.replicas.engine.reaper import Reaper
from vllm_omni_plugin.replicas.engine.socket_folder import use_socket_folder
from vllm_omni_plugin.replicas.replica_server.descriptor_limits import raise_limits
from vllm_omni_plugin.replicas.replica_server.replica_server import ReplicaServer
from vllm_omni_plugin.replicas.replica_server.server_settings import ReplicaIdentity
from vllm_omni_plugin.vllm_api.launch.engine_launch import forbid_fork
from vllm_omni_plugin.vllm_api.launch.spawning import SPAWN_LOCK
from vllm_omni_plugin.vllm_api.vllm_stages.stage_arguments import read_engine_args

_SLOT = SharedAdmissionStats.COUNTERS_PER_SLOT
_LOOPBACK = "127.0.0.1"


class ApiServerLauncher:
    """Starts API server processes, which share a listening socket and some memory.

    `connections`: see `ApiServerSupervisor`. `admitted` counts for `--max-num-queued-reqs`, a limit of all servers.
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
        """Start the process with this index, which must not be running."""
        client_config = {
            "client_count": len(self.connections),
            "client_index": index,
            "api_server_loads": self.connections,
        }
        if getattr(self._args, "max_num_queued_reqs", None) is not None:
            client_config["mp_admission_counters"] = self.admitted
        process = self._context.Process(
            target=_serve_http,
            name=f"ApiServer_{index}",
            args=(*self._listening, self._args, client_config, self._drained),
        )
        with SPAWN_LOCK:
            process.start()
        assert process.pid is not None
        self._on_spawn(process.pid)
        return process

    def clear_counts(self, index: int, pid: int) -> None:
        self.admitted[index * _SLOT] = 0
        multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _serve_http(
    listen_address: str,
    listening: socket.socket,
    args: argparse.Namespace,
    client_config: Any,
    drained: MutableSequence[int],
) -> None:
    # Ctrl-C reaches all processes, but the supervisor decides when they end. The server sets its own handler later.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setattr(args, SHARED_DRAIN_FLAG, drained)
    patch_engine_args(EngineArgs)
    run_api_server_worker_proc(listen_address, listening, args, client_config)


def serve_api_servers(args: argparse.Namespace, options: OmniConfig) -> int:
    return exit_status_of(partial(_serve_all, args, options))


def _serve_all(args: argparse.Namespace, options: OmniConfig, resources: ExitStack) -> None:
    forbid_fork()
    use_socket_folder()
    setup_multiprocess_prometheus()
    listen_address, listening = listen_for_clients(setup_server, args, reuse_port=True)
    resources.callback(_stop_listening, listening, args.uds)
    engine_args = read_engine_args(args)
    plans = () if options.join else _plans(engine_args, args.api_server_count, options)
    raise_limits(sum(plan.replicas for plan in plans), args.api_server_count)
    local_options = options if options.join else open_fleet(options, plans, resources)
    reaper = resources.enter_context(closing(Reaper()))
    joined = _joined(args, local_options)
    if options.admin_key_file is None and not args.uds:
        setattr(joined, LOCAL_ADMIN_KEY, publish_local_key(args.host, args.port))
    processes = ApiServerLauncher(args.api_server_count, listen_address, listening, joined, reaper.watch)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(local_options, plans, processes, reaper, engine_args.shutdown_timeout))


def _stop_listening(listening: socket.socket, path: str | None) -> None:
    listening.close()
    if path:
        # While the file exists, nobody can listen there.
        Path(path).unlink(missing_ok=True)


def _plans(engine_args: Any, api_servers: int, options: OmniConfig) -> Sequence[StagePlan]:
    # Engines keep device memory free for each API server.
    engine_args._api_process_count = max(engine_args._api_process_count, api_servers)
    engine_args._api_process_rank = -1
    vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    executor_class = Executor.get_class(vllm_config)
    return stage_plans(options, vllm_config, executor_class, not engine_args.disable_log_stats)


def open_fleet(options: OmniConfig, plans: Sequence[StagePlan], resources: ExitStack) -> OmniConfig:
    """Start the coordinator; returns the options with which the processes of this node find it and listen."""
    if not options.is_open:
        host, port, local_options = _LOOPBACK, 0, replace(options, master_address=_LOOPBACK)
        if not (local_options.secret_file or local_options.insecure):
            local_options = replace(local_options, secret_file=new_secret())
    else:
        assert options.master_port is not None
        host, port, local_options = bind_address(options, headless=False), options.master_port, options
        if ipaddress.ip_address(host).is_unspecified:
            local_options = replace(options, master_address=_LOOPBACK, replica_address=engines_address(options))
    local_options = with_secret(local_options, host)
    coordinator = start_coordinator(local_options, plans, host, port)
    resources.callback(coordinator.close)
    return replace(local_options, master_port=int(coordinator.router_address.rpartition(":")[2]))


def _joined(args: argparse.Namespace, options: OmniConfig) -> argparse.Namespace:
    """The command line of an API server that joins the fleet of these options."""
    joined = copy.copy(args)
    fields = ("master_address", "master_port", "secret_file")
    setattr(joined, FLEET_ADDRESS, {field: getattr(options, field) for field in fields})
    return joined


async def _serve(
    local_options: OmniConfig, plans: Sequence[StagePlan], processes: ApiServerLauncher, reaper: Reaper, timeout: float
) -> None:
    api_servers = ApiServerSupervisor(processes.connections, processes.start, processes.clear_counts)
    if local_options.admission is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, api_servers.signal, signal.SIGHUP)
    engines = sum(plan.replicas for plan in plans)
    with ThreadPoolExecutor(2 * max(engines, 1), thread_name_prefix="omni-engine") as executor:
        replicas: list[ReplicaServer] = []
        if plans:
            address, coordinator = bind_address(local_options, headless=True), coordinator_address(local_options)
            identities = [ReplicaIdentity(number) for numbers in own_numbers(plans) for number in numbers]
            replicas = replica_servers(
                plans,
                identities,
                local_options,
                address=address,
                coordinator=coordinator,
                on_spawn=reaper.watch,
                executor=executor,
            )
        await run_until_signal(api_servers, replicas, timeout)
