"""Our flags in `vllm serve`: how they are added, parsed, checked and carried into vLLM's configuration.

Imported by every process that parses vLLM's flags: nothing of vLLM or the fleet is imported until one of ours is set.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, NoReturn

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.flag_table import FLAGS
from vllm_omni_plugin.integration.no_model import allow_no_model

GROUP = "OmniConfig"
_EXIT_USAGE = 2
_WRAPPED = "_vllm_omni_plugin_flags"

JOINED = "omni_joined"
"""Attribute of the parsed arguments that makes an API server process a head without engines: its supervisor, which
has checked the rest, puts there where the fleet is: the fields master_address, master_port and secret_file of
`OmniConfig`."""


def add_omni_flags(arg_utils: Any) -> None:
    """Wrap what vLLM's `EngineArgs` adds to a parser and makes of its result. Idempotent.

    Args:
        arg_utils: the module `vllm.engine.arg_utils`.
    """
    engine_args_class = arg_utils.EngineArgs
    own_add_cli_args = engine_args_class.add_cli_args
    own_from_cli_args = engine_args_class.from_cli_args.__func__
    if hasattr(own_add_cli_args, _WRAPPED):
        return

    allow_no_model(arg_utils.FlexibleArgumentParser)

    @wraps(own_add_cli_args)
    def add_cli_args(parser: Any) -> Any:
        parser = own_add_cli_args(parser)
        add_group(parser)
        return parser

    @wraps(own_from_cli_args)
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        options = parse_or_exit(args)
        engine_args = own_from_cli_args(cls, args)
        if options is not None:
            _switch_fleet_on(engine_args, options, headless=bool(getattr(args, "headless", False)))
        return engine_args

    setattr(add_cli_args, _WRAPPED, True)
    engine_args_class.add_cli_args = staticmethod(add_cli_args)
    engine_args_class.from_cli_args = classmethod(from_cli_args)


class GivenFlag(argparse.Action):
    """Stores a flag's value, and takes over what vLLM's command line does once it is known that it is for us."""

    def __init__(self, option_strings: Sequence[str], dest: str, takes_value: bool, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=None if takes_value else 0, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """See `argparse.Action`."""
        from vllm_omni_plugin.integration.command import take_over_command

        setattr(namespace, self.dest, True if self.nargs == 0 else values)
        take_over_command(parse_or_exit)


def add_group(parser: argparse.ArgumentParser) -> None:
    """Add the argument group. Every default is None, so that "not given" can be told from any value."""
    group = parser.add_argument_group(
        title=GROUP, description="A fleet of engine replicas behind this server. Any of these flags switches it on."
    )
    for flag in FLAGS:
        about: dict[str, Any] = {"metavar": flag.metavar, "type": flag.type} if flag.takes_value else {}
        about.update(
            action=GivenFlag, takes_value=flag.takes_value, dest=flag.destination, help=flag.help_with_default()
        )
        try:
            group.add_argument(flag.name, *flag.aliases, **about)
        except argparse.ArgumentError:
            # Somebody else has an alias.
            group.add_argument(flag.name, **about)


def parse_or_exit(args: argparse.Namespace) -> OmniConfig | None:
    """As `parse_options`, but ends the process as argparse does when the options cannot be honoured."""
    try:
        return parse_options(args)
    except ConfigError as error:
        exit_with(error)


def exit_with(error: ConfigError) -> NoReturn:
    """End the process as argparse does."""
    sys.stderr.write(f"vllm serve: error: {error}\n")
    raise SystemExit(_EXIT_USAGE) from None


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
    joined = getattr(args, JOINED, None)
    if joined is not None:
        options = replace(options, join=True, **joined)

    from vllm_omni_plugin.balancing import build_load_balancer_factory
    from vllm_omni_plugin.integration.compatibility import refuse_unsupported
    from vllm_omni_plugin.integration.rules import check

    try:
        build_load_balancer_factory(options.lb_policy)
    except ConfigError as error:
        raise ConfigError(f"argument --omni-lb-policy: {error}") from error
    try:
        build_load_balancer_factory(options.lb_policy, options.lb_config)
    except ConfigError as error:
        raise ConfigError(f"argument --omni-lb-config: {error}") from error
    headless = bool(getattr(args, "headless", False))
    if joined is None:
        refuse_unsupported(args)
        check(options, given, headless, api_servers=_api_servers(args))
    if options.join:
        options = replace(options, dp_size_local=0)
    if options.pipeline is not None:
        from vllm_omni_plugin.integration.pipeline_command import lay_pipeline

        lay_pipeline(args, options, headless)
    return options


def _api_servers(args: argparse.Namespace) -> int:
    """How many API server processes `vllm serve` will start; vLLM's default is one for each data-parallel rank."""
    count: int = getattr(args, "api_server_count", None) or getattr(args, "data_parallel_size", None) or 1
    return count


def _switch_fleet_on(engine_args: Any, options: OmniConfig, headless: bool) -> None:
    from vllm_omni_plugin.integration.compatibility import prepare_engine_args
    from vllm_omni_plugin.integration.door import open_door
    from vllm_omni_plugin.integration.options import carry_options
    from vllm_omni_plugin.integration.pipeline_command import local_engines

    carry_options(engine_args, options)
    prepare_engine_args(engine_args, local_engines(options, headless))
    if not headless:
        open_door()
