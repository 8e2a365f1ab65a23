"""Reads our options from parsed arguments, checks them, and stores them in vLLM's engine arguments.

Every process that parses vLLM's flags imports this module, so it imports vLLM and the fleet only once one of our flags
is given.
"""

import argparse
import math
from dataclasses import replace
from typing import Any

from vllm_omni_plugin.config import FLAGS, OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.patching import patch_function

FLEET_ADDRESS = "omni_joined"
"""Attribute of the parsed arguments of an API server process: the fields master_address, master_port and secret_file of
the fleet that the server joins. Set by the supervisor process, which has checked the options already."""


def patch_engine_args(engine_args_class: Any) -> None:
    """Make vLLM's `EngineArgs` read our flags from parsed arguments. Idempotent."""
    patch_function(engine_args_class, "from_cli_args", _from_cli_args)


def _from_cli_args(original: Any, engine_args_class: Any, args: argparse.Namespace) -> Any:
    options = parse_or_exit(args)
    engine_args = original(engine_args_class, args)
    if engine_args.additional_config:
        _refuse_options_of_user(engine_args)
    if options is not None:
        _enable_fleet(engine_args, options, headless=bool(getattr(args, "headless", False)))
    return engine_args


def _refuse_options_of_user(engine_args: Any) -> None:
    from vllm_omni_plugin.integration.options.additional_config import exit_usage_error, refuse_options_of_user

    try:
        refuse_options_of_user(engine_args)
    except ConfigError as error:
        exit_usage_error(error)


def parse_or_exit(args: argparse.Namespace) -> OmniConfig | None:
    try:
        return parse_options(args)
    except ConfigError as error:
        from vllm_omni_plugin.integration.options.additional_config import exit_usage_error

        exit_usage_error(error)


def parse_options(args: argparse.Namespace) -> OmniConfig | None:
    """The checked options in parsed arguments, or None if none of our flags is given.

    With a pipeline, also sets the model and engine arguments of this process's stage in `args`. Raises ConfigError.
    """
    given = {
        flag.field: getattr(args, flag.destination)
        for flag in FLAGS
        if getattr(args, flag.destination, None) is not None
    }
    if not given:
        return None
    options = OmniConfig(**given)
    fleet_address = getattr(args, FLEET_ADDRESS, None)
    if fleet_address is not None:
        options = replace(options, join=True, **fleet_address)

    from vllm_omni_plugin.integration.options.admin_address import check_ports
    from vllm_omni_plugin.integration.options.compatibility import refuse_unsupported
    from vllm_omni_plugin.integration.options.flag_rules import check, check_policy

    check_policy(options)
    headless = bool(getattr(args, "headless", False))
    if fleet_address is None:
        refuse_unsupported(args)
        check(options, given, headless, api_servers=_api_servers(args))
        if not headless:
            check_ports(options, args)
    if options.join:
        options = replace(options, dp_size_local=0)
    if options.pipeline is not None:
        from vllm_omni_plugin.integration.fleet_setup.pipeline_command import apply_pipeline_file

        apply_pipeline_file(args, options, headless)
    return options


def _api_servers(args: argparse.Namespace) -> int:
    """The number of API server processes. vLLM's default is one for each data-parallel rank, without Rust."""
    from vllm_omni_plugin.integration.options.compatibility import uses_rust_front_end

    if uses_rust_front_end(args):
        return 1
    count: int = getattr(args, "api_server_count", None) or getattr(args, "data_parallel_size", None) or 1
    return count


def _enable_fleet(engine_args: Any, options: OmniConfig, headless: bool) -> None:
    """Store our options in the engine arguments; a head also gets its client and its drain timeout."""
    from vllm_omni_plugin.integration.async_llm import patch_async_llm
    from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_engines
    from vllm_omni_plugin.integration.options.additional_config import store_options
    from vllm_omni_plugin.integration.options.compatibility import prepare_engine_args

    store_options(engine_args, options)
    prepare_engine_args(engine_args, local_engines(options, headless))
    if not headless:
        # vLLM's default is to abort all requests at once. The number must be an integer.
        engine_args.shutdown_timeout = engine_args.shutdown_timeout or math.ceil(options.drain_timeout)
        patch_async_llm()
