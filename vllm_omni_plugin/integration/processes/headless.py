"""`vllm serve --headless` with our flags: a node whose replicas, of a model or a stage, join the head named by them."""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.reasoning import ReasoningParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor import Executor

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError, OmniError
from vllm_omni_plugin.integration.checks.head_checks import refuse_unlike_head
from vllm_omni_plugin.integration.fleet_setup.pipeline_command import pipeline_of
from vllm_omni_plugin.integration.options.carried_options import without_options
from vllm_omni_plugin.integration.options.listening import (
    bind_address,
    coordinator_address,
    secured,
    server_settings,
    warn_of_exposure,
)
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.engine.engine_start import Launcher
from vllm_omni_plugin.replicas.engine.reaper import Reaper
from vllm_omni_plugin.replicas.engine.socket_folder import use_socket_folder
from vllm_omni_plugin.replicas.server.node import run_node
from vllm_omni_plugin.replicas.server.replica_server import ReplicaServer
from vllm_omni_plugin.stages.stage_launcher import PythonStageLauncher, python_fingerprint
from vllm_omni_plugin.vllm_api.launch.engine_launch import share_cores, spawn_only
from vllm_omni_plugin.vllm_api.launch.group_launch import new_launcher, split_ranks
from vllm_omni_plugin.vllm_api.launch.model_fingerprint import fingerprint
from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.versions.serve_arguments import propagate_flash_late_interaction

logger = init_logger(__name__)

_EXIT_OK = 0
_EXIT_FAILED = 1
_RETRY_S = 1.0
_NOTICE_EVERY = 10


LauncherFor = Callable[[Any, bool, Callable[[int], None]], Launcher]
"""What starts engines, made from vLLM's configuration, whether engines report scheduler statistics, and what is told
the id of every process it starts."""


@dataclass(frozen=True)
class NodePlan:
    """What a node runs.

    Attributes:
        make_launcher: makes what starts its engines from what is told the id of every process it starts.
        fingerprint: what all replicas of the stage must have in common.
        replicas: how many there are; every data-parallel rank is one.
    """

    make_launcher: Callable[[Callable[[int], None]], Launcher]
    fingerprint: dict[str, str]
    replicas: int


def engine_launcher(vllm_config: Any, log_stats: bool, on_spawn: Callable[[int], None]) -> Launcher:
    """Starts vLLM's engines. They report what they have cached, since any head that comes may want to know."""
    return new_launcher(vllm_config, Executor.get_class(vllm_config), log_stats, on_spawn, report_cache=True)


def serve_replicas(args: argparse.Namespace, options: OmniConfig, launcher_for: LauncherFor = engine_launcher) -> int:
    """Run this node's replicas until they have left the fleet; returns the exit code of the process.

    Args:
        args: the parsed command line, as vLLM's own headless command gets it.
        options: ours among them.
        launcher_for: see `LauncherFor`; not for a Python stage.
    """
    spawn_only()
    use_socket_folder()
    node = plan_node(args, options, launcher_for)
    with Reaper() as reaper, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(options, node, node.make_launcher(reaper.watch)))
        except OmniError as error:
            sys.stderr.write(f"vllm serve: error: {error}\n")
            return _EXIT_FAILED
    return _EXIT_OK


def plan_node(args: argparse.Namespace, options: OmniConfig, launcher_for: LauncherFor = engine_launcher) -> NodePlan:
    """What a command line asks for; starts nothing. The arguments are those of `serve_replicas`."""
    pipeline = pipeline_of(options)
    stage = None if pipeline is None else pipeline.stages[options.stage_id]
    if stage is not None and not stage.is_vllm:
        return NodePlan(partial(PythonStageLauncher, stage), python_fingerprint(stage), options.dp_size_local)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    propagate_flash_late_interaction(args, engine_args)
    vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    engine_config, ranks = split_ranks(vllm_config)
    replicas = options.dp_size_local * ranks
    share_cores([engine_config], replicas)
    make_launcher = partial(launcher_for, without_options(engine_config), not engine_args.disable_log_stats)
    return NodePlan(make_launcher, fingerprint(vllm_config, options.stage_id), replicas)


async def _serve(options: OmniConfig, node: NodePlan, launcher: Launcher) -> None:
    address = await _find_own_address(options)
    options = secured(options, address, headless=True)
    warn_of_exposure(options, address)
    loop = asyncio.get_running_loop()
    coordinator = await loop.run_in_executor(None, coordinator_address, options)
    settings = server_settings(options, address, coordinator, options.stage_id, node.fingerprint)
    # Before anything is loaded, which may take minutes.
    await loop.run_in_executor(None, refuse_unlike_head, settings)
    # Two blocking steps per replica may run at once: the old engine's end and the new one's start.
    with ThreadPoolExecutor(2 * node.replicas, thread_name_prefix="omni-engine") as executor:
        servers = [ReplicaServer(settings, launcher, index, EngineApi(), executor) for index in range(node.replicas)]
        await run_node(servers, options.join_timeout, settings.coordinator_addr)


async def _find_own_address(options: OmniConfig) -> str:
    """The address to bind; waits for the head's name to resolve, since the name may come with the head."""
    loop = asyncio.get_running_loop()
    deadline = time.monotonic() + options.join_timeout if options.join_timeout else float("inf")
    attempt = 0
    while True:
        try:
            # Looking up a name blocks.
            return await loop.run_in_executor(None, lambda: bind_address(options, headless=True))
        except ConfigError as error:
            if time.monotonic() >= deadline:
                raise
            if attempt % _NOTICE_EVERY == 0:
                logger.warning("The head cannot be found yet: %s", error)
        attempt += 1
        await asyncio.sleep(_RETRY_S)
