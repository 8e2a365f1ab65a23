"""`vllm serve` itself, once one of our flags was given: early checks, headless nodes, and several API servers."""

import argparse
import sys
from functools import wraps
from typing import Any

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
    own_run_headless = serve.run_headless
    own_run_multi_api_server = serve.run_multi_api_server
    own_validate = serve.validate_parsed_serve_args

    @wraps(own_run_headless)
    def run_headless(args: argparse.Namespace) -> None:
        options = parse_or_exit(args)
        if options is None:
            own_run_headless(args)
            return
        from vllm_omni_plugin.integration.processes.headless import serve_replicas

        raise SystemExit(serve_replicas(args, options))

    @wraps(own_run_multi_api_server)
    def run_multi_api_server(args: argparse.Namespace) -> None:
        options = parse_or_exit(args)
        if options is None:
            own_run_multi_api_server(args)
            return
        from vllm_omni_plugin.integration.processes.several_servers import serve_api_servers

        raise SystemExit(serve_api_servers(args, options))

    @wraps(own_validate)
    def validate(args: argparse.Namespace) -> None:
        parse_or_exit(args)
        own_validate(args)

    setattr(run_headless, _TAKEN_OVER, True)
    serve.run_headless = run_headless
    serve.run_multi_api_server = run_multi_api_server
    serve.validate_parsed_serve_args = validate
