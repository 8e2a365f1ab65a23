"""`vllm serve --headless` with our flags: runs the replicas of a node, which join a head."""

import argparse
import asyncio
import ipaddress
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import uvloop
from vllm.reasoning import ReasoningParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor import Executor as VllmExecutor

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError, OmniError, RefusedByHeadError
from vllm_omni_plugin.integration.checks.head_checks import require_fitting_head, require_same_model
from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_processes, pipeline_of
from vllm_omni_plugin.integration.fleet_setup.stage_planning import StagePlan, model_plan, python_plan
from vllm_omni_plugin.integration.options import listening
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.engine.engine_keeper import FirstStarts
from vllm_omni_plugin.replicas.engine.engine_start import Launcher
from vllm_omni_plugin.replicas.engine.reaper import Reaper
from vllm_omni_plugin.replicas.engine.socket_folder import use_socket_folder
from vllm_omni_plugin.replicas.links.replica_ports import PortRange
from vllm_omni_plugin.replicas.machines.group_leader import leading
from vllm_omni_plugin.replicas.machines.group_machine import GroupMachine, RanksLauncher
from vllm_omni_plugin.replicas.machines.meeting_host import LauncherOverMachines
from vllm_omni_plugin.replicas.machines.meetings import report_interval, setup_of
from vllm_omni_plugin.replicas.machines.other_machine import MachineSettings, OtherMachine
from vllm_omni_plugin.replicas.replica_server.host_slots import HostSlots
from vllm_omni_plugin.replicas.replica_server.node import drain_all, run_machine, run_node
from vllm_omni_plugin.replicas.replica_server.replica_server import ReplicaServer
from vllm_omni_plugin.replicas.replica_server.server_settings import ReplicaIdentity, ServerSettings
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.launch.engine_identity import listen_for_transfers_at
from vllm_omni_plugin.vllm_api.launch.engine_launch import forbid_fork
from vllm_omni_plugin.vllm_api.launch.group_launch import new_launcher, set_own_ranks
from vllm_omni_plugin.vllm_api.launch.machines_launch import MachinesLauncher, use_network_of
from vllm_omni_plugin.vllm_api.vllm_stages.stage_arguments import read_engine_args

logger = init_logger(__name__)

_EXIT_OK = 0
_EXIT_FAILED = 1
_EXIT_REFUSED = os.EX_TEMPFAIL
"""The only failure that may be temporary: the head may be restarted with this node's model."""
_RETRY_S = 1.0
_WARN_EVERY = 10
_GROUP_THREADS = 3
"""To begin and to end a meeting, and to end one that has just begun."""


def serve_replicas(
    args: argparse.Namespace,
    options: OmniConfig,
    launcher: Callable[..., Launcher] = new_launcher,
    program: str = "vllm serve",
) -> int:
    """Run this node's replicas until they have left; returns the exit status. Errors name the `program`."""
    forbid_fork()
    if args.nnodes > 1 and args.node_rank > 0 and args.data_parallel_size == 1:
        # It has no engine, only workers of one.
        return serve_other_machine(args, options, program)
    use_socket_folder()
    with closing(Reaper()) as reaper, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            options, address, coordinator = runner.run(_find_addresses(options))
            place: tuple[int, str] | None = None
            if args.nnodes > 1:
                machine_address = runner.run(_machine_address(args, options))
                use_network_of(machine_address)
                if args.data_parallel_size > 1:
                    place = (args.node_rank, machine_address)
            with HostSlots(local_processes(args, options)[0], address, coordinator) as slots:
                # Before vLLM configures the model, which takes many seconds.
                answer = require_fitting_head(coordinator, options, slots.names)
                plan = plan_node(args, options, launcher)
                if answer.info is None or not answer.info.numbers:
                    # It may have started meanwhile, or know now which numbers are free.
                    answer = require_fitting_head(coordinator, options, slots.names)
                require_same_model(answer, plan.stage_id, plan.fingerprint)
                identities = slots.identities(() if answer.info is None else answer.info.numbers)
                runner.run(serve_node(options, plan, identities, address, coordinator, reaper=reaper, place=place))
        except OmniError as error:
            sys.stderr.write(f"{program}: error: {error}\n")
            return _EXIT_REFUSED if isinstance(error, RefusedByHeadError) else _EXIT_FAILED
    return _EXIT_OK


def serve_other_machine(args: argparse.Namespace, options: OmniConfig, program: str) -> int:
    """Run this machine's workers of a replica over several machines, of which it is not the first; as above."""
    with closing(Reaper()) as reaper, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve_other_machine(args, options, reaper))
        except OmniError as error:
            sys.stderr.write(f"{program}: error: {error}\n")
            return _EXIT_FAILED
    return _EXIT_OK


async def _serve_other_machine(args: argparse.Namespace, options: OmniConfig, reaper: Reaper) -> None:
    address = await _machine_address(args, options)
    options = listening.with_secret(options, address, headless=True)
    listening.warn_if_insecure(options, address)
    use_network_of(address)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2, thread_name_prefix="omni-workers") as executor:
        plan = await loop.run_in_executor(executor, plan_node, args, options)
        launcher = plan.make_launcher(reaper.watch, report_cache=False, numbers=[0])
        assert isinstance(launcher, MachinesLauncher)
        settings = _machine_settings(options, plan, launcher, args.node_rank, address)
        machine = OtherMachine(
            settings,
            lambda meeting: launcher.start_workers(meeting.number, meeting.incarnation, meeting.port),
            executor,
            time.monotonic,
        )
        await run_machine(machine, options.join_timeout, options.drain_timeout)


async def _machine_address(args: argparse.Namespace, options: OmniConfig) -> str:
    """That of this machine of several, on the network over which they compute; sets `args.master_addr` on the first."""
    if args.node_rank:
        return await _wait_for(
            options, lambda: listening.address_towards(args.master_addr, args.master_port, "--master-addr")
        )
    own = args.master_addr = await _wait_for(options, lambda: listening.resolve(args.master_addr, "--master-addr"))
    if ":" in own and args.data_parallel_size > 1:
        raise ConfigError(f"argument --master-addr: {own}: vLLM's ranks find each other over IPv4 only")
    if ipaddress.ip_address(own).is_loopback:
        logger.warning("--master-addr is %s here: machines elsewhere cannot reach this one there.", own)
    return own


def _machine_settings(
    options: OmniConfig, plan: StagePlan, launcher: LauncherOverMachines, rank: int, address: str
) -> MachineSettings:
    first, port = launcher.meeting_address
    return MachineSettings(
        rank,
        address,
        f"tcp://[{first}]:{port}" if ":" in first else f"tcp://{first}:{port}",
        setup_of(plan.fingerprint, launcher.layout),
        Secrets.from_file(options.secret_file) if options.secret_file else None,
        report_interval(options.heartbeat_interval),
        options.heartbeat_timeout,
    )


def replica_servers(
    plans: Sequence[StagePlan],
    identities: Sequence[ReplicaIdentity],
    options: OmniConfig,
    *,
    address: str,
    coordinator: str,
    on_spawn: Callable[[int], None],
    executor: Executor,
    first_incarnation: int = 0,
) -> list[ReplicaServer]:
    """The servers of a node's replicas, not started; `identities` are in the order of the plans.

    `options` come from `with_secret`. A replica uses two threads of `executor`: one ends the old engine, the other
    starts the new one.
    """
    listen_for_transfers_at(address)
    servers: list[ReplicaServer] = []
    remaining = iter(identities)
    for plan in plans:
        settings = ServerSettings(
            host=address,
            ports=None if options.replica_ports is None else PortRange.parse(options.replica_ports),
            coordinator_addr=coordinator,
            stage_id=plan.stage_id,
            heartbeat_interval=options.heartbeat_interval,
            heartbeat_timeout=options.heartbeat_timeout,
            drain_timeout=options.drain_timeout,
            secrets=Secrets.from_file(options.secret_file) if options.secret_file else None,
            fingerprint=plan.fingerprint,
            max_message_bytes=options.max_message_bytes,
        )
        own = list(islice(remaining, plan.replicas))
        numbers = [identity.number for identity in own]
        # A head that uses the prefix caches may join at any time.
        launcher = plan.make_launcher(
            on_spawn, report_cache=True, numbers=numbers, for_others=True, first_incarnation=first_incarnation
        )
        first_starts = FirstStarts(plan.replicas)
        servers += [
            ReplicaServer(settings, launcher, index, plan.api, executor, identity=identity, first_starts=first_starts)
            for index, identity in enumerate(own)
        ]
    return servers


def plan_node(
    args: argparse.Namespace, options: OmniConfig, launcher: Callable[..., Launcher] = new_launcher
) -> StagePlan:
    """The plan of a node's replicas. Arguments as of `serve_replicas`; starts nothing."""
    pipeline = pipeline_of(options)
    stage = None if pipeline is None else pipeline.stages[options.stage_id]
    if stage is not None and not stage.is_vllm:
        return python_plan(stage, options.dp_size_local, EngineApi())
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    engine_args = read_engine_args(args)
    is_in_group = engine_args.nnodes > 1 and engine_args.data_parallel_size > 1
    if is_in_group:
        set_own_ranks(engine_args)
    vllm_config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=is_in_group)
    executor_class = VllmExecutor.get_class(vllm_config)
    return model_plan(options, vllm_config, executor_class, not engine_args.disable_log_stats, launcher)


async def _find_addresses(options: OmniConfig) -> tuple[OmniConfig, str, str]:
    # Resolving a name blocks.
    address = await _wait_for(options, lambda: listening.bind_address(options, headless=True))
    options = listening.with_secret(options, address, headless=True)
    listening.warn_if_insecure(options, address)
    coordinator = await asyncio.get_running_loop().run_in_executor(None, listening.coordinator_address, options)
    return options, address, coordinator


async def serve_node(
    options: OmniConfig,
    plan: StagePlan,
    identities: Sequence[ReplicaIdentity],
    address: str,
    coordinator: str,
    *,
    reaper: Reaper,
    place: tuple[int, str] | None = None,
) -> None:
    """`place`: rank and address of this machine in a lockstep group over several."""
    threads = 2 * plan.replicas + (_GROUP_THREADS if place else 0)
    with ThreadPoolExecutor(threads, thread_name_prefix="omni-engine") as executor:
        servers: list[ReplicaServer] = []
        if place is not None:
            drain = partial(drain_all, servers)
            plan = replace(plan, make_launcher=partial(_machine_of_group, options, plan, executor, place, drain))
        # A node that is started again must not repeat its samples while the rest of the fleet goes on.
        incarnation = time.time_ns()
        servers += replica_servers(
            [plan],
            identities,
            options,
            address=address,
            coordinator=coordinator,
            on_spawn=reaper.watch,
            executor=executor,
            first_incarnation=incarnation,
        )
        machine = servers[0].launcher if place else None
        assert machine is None or isinstance(machine, GroupMachine)
        await run_node(servers, options.join_timeout, coordinator, machine)


def _machine_of_group(
    options: OmniConfig,
    plan: StagePlan,
    executor: Executor,
    place: tuple[int, str],
    drain: Callable[[], None],
    *args: Any,
    **named: Any,
) -> GroupMachine:
    """This machine of a lockstep group over several, in place of the launcher of its ranks; `place` as above."""
    launcher = plan.make_launcher(*args, **named)
    assert isinstance(launcher, RanksLauncher)
    rank, own_address = place
    settings = _machine_settings(options, plan, launcher, rank, own_address)
    lead = nullcontext if rank else partial(leading, settings, launcher, executor, time.monotonic)
    return GroupMachine(settings, launcher, executor, time.monotonic, drain, lead)


async def _wait_for(options: OmniConfig, find: Callable[[], str]) -> str:
    """The address that `find` finds. A name may not resolve before its machine is there."""
    loop = asyncio.get_running_loop()
    deadline = time.monotonic() + options.join_timeout if options.join_timeout else float("inf")
    attempt = 0
    while True:
        try:
            return await loop.run_in_executor(None, find)
        except ConfigError as error:
            if time.monotonic() >= deadline:
                raise
            if attempt % _WARN_EVERY == 0:
                logger.warning("This node waits: %s", error)
        attempt += 1
        await asyncio.sleep(_RETRY_S)
