"""Our flags in `vllm serve`: how they are added, parsed, checked and carried into vLLM's configuration.

Imported by every process that parses vLLM's flags: nothing of vLLM or the fleet is imported until one of ours is set.
"""

import argparse
import sys
from functools import wraps
from typing import Any

from vllm_omni_plugin.config import DEFAULT_DP_SIZE_LOCAL, DEFAULT_LB_POLICY, DEFAULT_MIGRATION_LIMIT, OmniConfig
from vllm_omni_plugin.errors import ConfigError

GROUP = "OmniConfig"
_WRAPPED = "_vllm_omni_plugin_flags"

_DESTINATIONS = {
    "omni_lb_policy": "lb_policy",
    "omni_dp_size_local": "dp_size_local",
    "omni_migration_limit": "migration_limit",
}
"""Where argparse leaves each flag, and the field of `OmniConfig` it sets. A flag not given leaves None."""


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

    @wraps(own_add_cli_args)
    def add_cli_args(parser: Any) -> Any:
        parser = own_add_cli_args(parser)
        add_group(parser)
        return parser

    @wraps(own_from_cli_args)
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        engine_args = own_from_cli_args(cls, args)
        try:
            options = parse_options(args)
            if options is not None:
                _switch_fleet_on(engine_args, options)
        except ConfigError as error:
            sys.stderr.write(f"vllm serve: error: {error}\n")
            raise SystemExit(2) from None
        return engine_args

    setattr(add_cli_args, _WRAPPED, True)
    engine_args_class.add_cli_args = staticmethod(add_cli_args)
    engine_args_class.from_cli_args = classmethod(from_cli_args)


def add_group(parser: argparse.ArgumentParser) -> None:
    """Add the argument group. Every default is None, so that "not given" can be told from any value."""
    group = parser.add_argument_group(
        title=GROUP, description="A fleet of engine replicas behind this server. Any of these flags switches it on."
    )
    group.add_argument(
        "--omni-lb-policy",
        metavar="POLICY",
        help="How requests are balanced over the replicas: random, round-robin, least-queue-length, the name of an "
        f"installed policy, or package.module:Class. {_default(DEFAULT_LB_POLICY)}",
    )
    group.add_argument(
        "--omni-dp-size-local",
        type=_at_least(1, "this version needs at least one replica in the head itself"),
        metavar="N",
        help=f"Replicas of the model that this server runs itself. {_default(DEFAULT_DP_SIZE_LOCAL)}",
    )
    group.add_argument(
        "--omni-migration-limit",
        type=_at_least(0, "a request cannot move a negative number of times"),
        metavar="N",
        help="How often a request may move to another replica because its replica was lost, before it fails. "
        f"{_default(DEFAULT_MIGRATION_LIMIT)}",
    )


def parse_options(args: argparse.Namespace) -> OmniConfig | None:
    """The options in parsed arguments, or None if no flag of ours was given.

    Raises:
        ConfigError: a value or a combination cannot be honoured.
    """
    given = {
        field: getattr(args, destination)
        for destination, field in _DESTINATIONS.items()
        if getattr(args, destination, None) is not None
    }
    if not given:
        return None
    options = OmniConfig(**given)

    from vllm_omni_plugin.balancing import build_load_balancer_factory
    from vllm_omni_plugin.integration.compatibility import refuse_unsupported

    try:
        build_load_balancer_factory(options.lb_policy)
    except ConfigError as error:
        raise ConfigError(f"argument --omni-lb-policy: {error}") from error
    refuse_unsupported(args)
    return options


def _switch_fleet_on(engine_args: Any, options: OmniConfig) -> None:
    from vllm_omni_plugin.integration.compatibility import prepare_engine_args
    from vllm_omni_plugin.integration.door import open_door
    from vllm_omni_plugin.integration.options import carry_options

    carry_options(engine_args, options)
    prepare_engine_args(engine_args, options)
    open_door()


def _default(value: object) -> str:
    """The default for a help text. Its last part prints nothing, but keeps vLLM's formatter from adding our None."""
    return f"(default: {value})%(default).0s"


def _at_least(minimum: int, reason: str) -> Any:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}: {reason}")
        return value

    return integer
