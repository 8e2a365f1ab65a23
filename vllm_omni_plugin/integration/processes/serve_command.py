"""Patches `vllm serve`: our checks first, and our own headless nodes and supervisor of several API servers."""

import argparse
import signal
import sys
from typing import Any

from vllm_omni_plugin.integration.command_line import parse_or_exit
from vllm_omni_plugin.integration.options.listening import listen_for_clients
from vllm_omni_plugin.integration.patching import patch_function
from vllm_omni_plugin.integration.processes.init_process import leave_process_1

_SERVE = "vllm.entrypoints.cli.serve"
_ENTRY = "vllm.entrypoints.launchers.api_server.entry"


def patch_serve_command() -> None:
    """Patch `vllm serve`. Called when the first of our flags is parsed. Idempotent."""
    serve: Any = sys.modules.get(_SERVE)
    if serve is not None:
        patch_function(serve, "validate_parsed_serve_args", validate)
        patch_function(serve, "run_headless", run_headless)
        patch_function(serve, "run_multi_api_server", run_api_servers)
        # Of one API server. Several, and the Rust front end, are started by us.
        patch_function(sys.modules[_ENTRY], "setup_server", listen_for_clients)


def validate(original: Any, args: argparse.Namespace) -> None:
    """In place of vLLM's check of a command line, `original`."""
    options = parse_or_exit(args)
    original(args)
    if options is not None:
        # It ends nothing, neither this process nor its children, which inherit this. A head with an admission file
        # handles it once it serves.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Before anything is started: threads and children do not go along.
        leave_process_1()
        from vllm_omni_plugin.integration.checks.start_checks import check_or_exit
        from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_processes
        from vllm_omni_plugin.integration.options.compatibility import uses_rust_front_end

        needs = local_processes(args, options)
        check_or_exit(options, *needs, bool(args.headless), rust_front_end=uses_rust_front_end(args))


def run_headless(original: Any, args: argparse.Namespace) -> None:
    """In place of vLLM's headless engines; raises SystemExit with our flags."""
    options = parse_or_exit(args)
    if options is not None:
        from vllm_omni_plugin.integration.processes.headless import serve_replicas

        raise SystemExit(serve_replicas(args, options))
    original(args)


def run_api_servers(original: Any, args: argparse.Namespace) -> None:
    """With our flags our own servers, Rust or several API servers, then SystemExit; else vLLM's."""
    options = parse_or_exit(args)
    if options is not None:
        from vllm import envs

        if envs.VLLM_USE_RUST_FRONTEND:
            from vllm_omni_plugin.integration.rust_front_end.serve import serve_behind_rust

            raise SystemExit(serve_behind_rust(args, options))
        from vllm_omni_plugin.integration.processes.several_servers import serve_api_servers

        raise SystemExit(serve_api_servers(args, options))
    original(args)
