"""`vllm serve` itself, once one of our flags was given: early checks, headless nodes, and several API servers."""

import argparse
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.integration.command_line import parse_or_exit

_SERVE = "vllm.entrypoints.cli.serve"
_TAKEN_OVER = "_vllm_omni_plugin_command"


def take_over_command() -> None:
    """Make `vllm serve` check our flags first, and run our own processes for all but a single API server. Idempotent.

    Done when the first flag of ours is parsed, hence never for a command line without one.
    """
    serve: Any = sys.modules.get(_SERVE)
    if serve is None or hasattr(serve.run_headless, _TAKEN_OVER):
        return
    own_validate = serve.validate_parsed_serve_args

    @wraps(own_validate)
    def validate(args: argparse.Namespace) -> None:
        options = parse_or_exit(args)
        own_validate(args)
        if options is not None:
            from vllm_omni_plugin.integration.checks.start_checks import check_or_exit
            from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_engines

            check_or_exit(args, options, local_engines(options, bool(args.headless)))

    serve.run_headless = _with_our_flags(serve.run_headless, _run_headless)
    serve.run_multi_api_server = _with_our_flags(serve.run_multi_api_server, _run_api_servers)
    serve.validate_parsed_serve_args = validate
    setattr(serve.run_headless, _TAKEN_OVER, True)


def _with_our_flags(own: Any, ours: Callable[[argparse.Namespace, OmniConfig], int]) -> Any:
    """What runs `ours` for a command line with our flags, and vLLM's `own` for any other."""

    @wraps(own)
    def run(args: argparse.Namespace) -> None:
        options = parse_or_exit(args)
        if options is not None:
            raise SystemExit(ours(args, options))
        own(args)

    return run


def _run_headless(args: argparse.Namespace, options: OmniConfig) -> int:
    from vllm_omni_plugin.integration.processes.headless import serve_replicas

    return serve_replicas(args, options)


def _run_api_servers(args: argparse.Namespace, options: OmniConfig) -> int:
    from vllm_omni_plugin.integration.processes.several_servers import serve_api_servers

    return serve_api_servers(args, options)
