"""`vllm serve --api-server-count N` with our flags: N heads that have joined, and what they share."""

import argparse
import asyncio
import copy
import ipaddress
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import get_ip
from vllm.v1.executor import Executor
from vllm.v1.metrics.prometheus import setup_multiprocess_prometheus

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import OmniCoordinatorRuntime
from vllm_omni_plugin.curve import new_secret
from vllm_omni_plugin.errors import ConfigError, OmniError
from vllm_omni_plugin.integration.command_line import JOINED
from vllm_omni_plugin.integration.fleet_setup.stage_plan import StagePlan
from vllm_omni_plugin.integration.fleet_setup.stage_planning import stage_plans
from vllm_omni_plugin.integration.options.carried_options import exit_with
from vllm_omni_plugin.integration.options.listening import (
    bind_address,
    coordinator_address,
    say_how_to_join,
    secured,
    server_settings,
    warn_of_exposure,
)
from vllm_omni_plugin.integration.processes.api_server_process import ApiServerProcesses
from vllm_omni_plugin.integration.processes.api_servers import ApiServers
from vllm_omni_plugin.integration.processes.supervisor import supervise
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.engine.reaper import Reaper
from vllm_omni_plugin.replicas.engine.socket_folder import use_socket_folder
from vllm_omni_plugin.replicas.server.descriptor_limits import raise_limits
from vllm_omni_plugin.replicas.server.node import SIGNALS
from vllm_omni_plugin.replicas.server.replica_server import ReplicaServer
from vllm_omni_plugin.vllm_api.launch.engine_launch import spawn_only
from vllm_omni_plugin.vllm_api.versions.serve_arguments import propagate_flash_late_interaction

logger = init_logger(__name__)

_EXIT_OK = 0
_EXIT_FAILED = 1
_LOOPBACK = "127.0.0.1"


def serve_api_servers(args: argparse.Namespace, options: OmniConfig) -> int:
    """Run several API servers, with the coordinator and the replicas of this node; returns the process's exit code.

    Args:
        args: the parsed command line, as vLLM's own command for several API servers gets it.
        options: ours among them. A head that joins has neither coordinator nor replicas.
    """
    _on_signals(_leave)
    spawn_only()
    use_socket_folder()
    setup_multiprocess_prometheus()
    listen_address, listening = setup_server(args, reuse_port=True)
    with ExitStack() as resources:
        resources.callback(_stop_listening, listening, args.uds)
        engine_args = AsyncEngineArgs.from_cli_args(args)
        propagate_flash_late_interaction(args, engine_args)
        try:
            plans = () if options.join else _plans(engine_args, args.api_server_count, options)
            raise_limits(sum(plan.replicas for plan in plans), args.api_server_count)
            home = options if options.join else _open_fleet(options, resources)
            reaper = resources.enter_context(Reaper())
            processes = ApiServerProcesses(
                args.api_server_count, listen_address, listening, _joined(args, home), reaper.watch
            )
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(home, plans, processes, reaper, engine_args.shutdown_timeout))
        except ConfigError as error:
            exit_with(error)
        except OmniError as error:
            sys.stderr.write(f"vllm serve: error: {error}\n")
            return _EXIT_FAILED
        finally:
            # What is left to do takes moments, and must be done.
            _on_signals(signal.SIG_IGN)
    return _EXIT_OK


def _on_signals(handler: Any) -> None:
    for signum in SIGNALS:
        signal.signal(signum, handler)


def _leave(signum: int, frame: Any) -> None:
    raise SystemExit(_EXIT_OK)


def _stop_listening(listening: socket.socket, path: str | None) -> None:
    listening.close()
    if path:
        # Nobody can listen there again while it exists.
        Path(path).unlink(missing_ok=True)


def _plans(engine_args: Any, api_servers: int, options: OmniConfig) -> Sequence[StagePlan]:
    # Engines keep memory of their devices free for each.
    engine_args._api_process_count = max(engine_args._api_process_count, api_servers)
    engine_args._api_process_rank = -1
    vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    executor_class = Executor.get_class(vllm_config)
    return stage_plans(options, vllm_config, executor_class, not engine_args.disable_log_stats)


def _open_fleet(options: OmniConfig, resources: ExitStack) -> OmniConfig:
    """Start the coordinator; returns the options with which processes of this node find it and listen themselves."""
    if not options.is_open:
        host, port, home = _LOOPBACK, 0, replace(options, master_address=_LOOPBACK)
        if not (home.secret_file or home.insecure):
            home = replace(home, secret_file=new_secret())
    else:
        assert options.master_port is not None
        host, port, home = bind_address(options, headless=False), options.master_port, options
        if ipaddress.ip_address(host).is_unspecified:
            home = replace(options, master_address=_LOOPBACK, replica_address=options.replica_address or get_ip())
    home = secured(home, host)
    warn_of_exposure(options, host)
    coordinator = OmniCoordinatorRuntime(host, port, options.heartbeat_timeout, secret_file=home.secret_file)
    resources.callback(coordinator.close)
    if options.is_open:
        say_how_to_join(options, host)
    return replace(home, master_port=int(coordinator.router_address.rpartition(":")[2]))


def _joined(args: argparse.Namespace, home: OmniConfig) -> argparse.Namespace:
    """The command line of one API server."""
    own = copy.copy(args)
    where = ("master_address", "master_port", "secret_file")
    setattr(own, JOINED, {field: getattr(home, field) for field in where})
    return own


async def _serve(
    home: OmniConfig, plans: Sequence[StagePlan], processes: ApiServerProcesses, reaper: Reaper, timeout: float
) -> None:
    api_servers = ApiServers(processes.connections, processes.start, processes.forget)
    engines = sum(plan.replicas for plan in plans)
    settings = {
        plan.stage_id: server_settings(
            home, bind_address(home, headless=True), coordinator_address(home), plan.stage_id, plan.fingerprint
        )
        for plan in plans
    }
    # Two blocking steps per replica may run at once: the old engine's end and the new one's start.
    with ThreadPoolExecutor(2 * max(engines, 1), thread_name_prefix="omni-engine") as executor:
        replicas = [
            ReplicaServer(settings[plan.stage_id], launcher, index, plan.api, executor)
            for plan in plans
            for launcher in [plan.launcher_for(reaper.watch, True, True)]
            for index in range(plan.replicas)
        ]
        await supervise(api_servers, replicas, timeout)
