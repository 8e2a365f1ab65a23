"""What a command line with our flags means to vLLM: options, checked, and carried into its configuration.

Imported by every process that parses vLLM's flags: nothing of vLLM or the fleet is imported until one of ours is set.
"""

import argparse
import math
from dataclasses import replace
from typing import Any

from vllm_omni_plugin.config import FLAGS, OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.patching import patch_function

FLEET_ADDRESS = "omni_joined"
"""Attribute of the parsed arguments that makes an API server process a head without engines: its supervisor, which
has checked the rest, puts there where the fleet is: the fields master_address, master_port and secret_file of
`OmniConfig`."""


def patch_engine_args(engine_args_class: Any) -> None:
    """Make vLLM's `EngineArgs` read our flags, too, from parsed arguments. Idempotent."""
    patch_function(engine_args_class, "from_cli_args", _from_cli_args)


def _from_cli_args(own: Any, engine_args_class: Any, args: argparse.Namespace) -> Any:
    options = parse_or_exit(args)
    engine_args = own(engine_args_class, args)
    if options is not None:
        _switch_fleet_on(engine_args, options, headless=bool(getattr(args, "headless", False)))
    return engine_args


def parse_or_exit(args: argparse.Namespace) -> OmniConfig | None:
    """As `parse_options`, but ends the process as argparse does when the options cannot be honoured."""
    try:
        return parse_options(args)
    except ConfigError as error:
        from vllm_omni_plugin.integration.options.additional_config import exit_usage_error

        exit_usage_error(error)


def parse_options(args: argparse.Namespace) -> OmniConfig | None:
    """The options in parsed arguments, or None if no flag of ours was given.

    With a pipeline, what its file says of the model and engine of this process is set in the arguments.

    Raises:
        ConfigError: a value or a combination cannot be honoured.
    """
    given = {
        flag.field: getattr(args, flag.destination)
        for flag in FLAGS
        if getattr(args, flag.destination, None) is not None
    }
    if not given:
        return None
    options = OmniConfig(**given)
    joined = getattr(args, FLEET_ADDRESS, None)
    if joined is not None:
        options = replace(options, join=True, **joined)

    from vllm_omni_plugin.integration.options.compatibility import refuse_unsupported
    from vllm_omni_plugin.integration.options.flag_rules import check, check_policy

    check_policy(options)
    headless = bool(getattr(args, "headless", False))
    if joined is None:
        refuse_unsupported(args)
        check(options, given, headless, api_servers=_api_servers(args))
    if options.join:
        options = replace(options, dp_size_local=0)
    if options.pipeline is not None:
        from vllm_omni_plugin.integration.fleet_setup.pipeline_command import apply_pipeline_file

        apply_pipeline_file(args, options, headless)
    return options


def _api_servers(args: argparse.Namespace) -> int:
    """How many API server processes `vllm serve` will start; vLLM's default is one for each data-parallel rank."""
    count: int = getattr(args, "api_server_count", None) or getattr(args, "data_parallel_size", None) or 1
    return count


def _switch_fleet_on(engine_args: Any, options: OmniConfig, headless: bool) -> None:
    from vllm_omni_plugin.integration.async_llm import patch_async_llm
    from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_engines
    from vllm_omni_plugin.integration.options.additional_config import store_options
    from vllm_omni_plugin.integration.options.compatibility import prepare_engine_args

    store_options(engine_args, options)
    prepare_engine_args(engine_args, local_engines(options, headless))
    if not headless:
        # vLLM's default aborts all at once; a whole number, since vLLM knows no other.
        engine_args.shutdown_timeout = engine_args.shutdown_timeout or math.ceil(options.drain_timeout)
        patch_async_llm()
