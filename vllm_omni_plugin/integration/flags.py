"""Adds our flags to the parser of `vllm serve`.

Every process that parses vLLM's flags imports this module, so it imports vLLM and the fleet only once one of our flags
is given.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

from vllm_omni_plugin.config import FLAGS, NO_MODEL
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.command_line import patch_engine_args
from vllm_omni_plugin.integration.patching import patch_function

GROUP = "OmniConfig"
_ANY_VLLM = "--omni-any-vllm"
ANY_VLLM_PATTERN = re.compile(r"--omni[-_]any[-_]vllm$")
_PIPELINE = re.compile(r"--omni[-_]pipeline(=|$)")
CONFIG = "--config"
"""vLLM's flag for a file with more arguments."""
_OURS = re.compile(r"--omni[^=]*")


def add_omni_flags(arg_utils: Any) -> None:
    """Make the parser of `vllm.engine.arg_utils` accept our flags, and `EngineArgs` read them. Idempotent."""
    patch_function(arg_utils.EngineArgs, "add_cli_args", _add_cli_args)
    patch_engine_args(arg_utils.EngineArgs)
    patch_parser(arg_utils.FlexibleArgumentParser)


def _add_cli_args(original: Any, parser: Any) -> Any:
    parser = original(parser)
    add_group(parser)
    return parser


class FleetFlagAction(argparse.Action):
    """Stores the value of one of our flags. The first of them on a command line also patches `vllm serve`."""

    def __init__(self, option_strings: Sequence[str], dest: str, takes_value: bool, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=None if takes_value else 0, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        require_supported_version(parser, namespace)
        from vllm_omni_plugin.integration.processes.serve_command import patch_serve_command

        setattr(namespace, self.dest, True if self.nargs == 0 else values)
        patch_serve_command()


def require_supported_version(parser: Any, namespace: argparse.Namespace) -> None:
    """Exit with an error if the installed vLLM is not supported; only warn if `--omni-any-vllm` is given anywhere.

    Does nothing from the second of our flags on.
    """
    if any(getattr(namespace, flag.destination, None) is not None for flag in FLAGS):
        return
    from vllm_omni_plugin.logger import init_logger
    from vllm_omni_plugin.vllm_api.versions.supported import installed_version, why_unsupported

    reason = why_unsupported(installed_version())
    if reason is None:
        return
    if not any(map(ANY_VLLM_PATTERN.match, _with_config(parser, sys.argv[1:]))):
        from vllm_omni_plugin.integration.options.additional_config import exit_usage_error

        exit_usage_error(ConfigError(f"--omni-* flags: {reason}"))
    init_logger(__name__).warning("%s: %s. Anything may go wrong.", _ANY_VLLM, reason)


def add_group(parser: argparse.ArgumentParser) -> None:
    """Add the argument group. Every default is None, which means "not given"."""
    group = parser.add_argument_group(
        title=GROUP, description="A fleet of engine replicas behind this server. Any of these flags switches it on."
    )
    for flag in FLAGS:
        about: dict[str, Any] = {"metavar": flag.metavar, "type": flag.type} if flag.takes_value else {}
        about.update(
            action=FleetFlagAction, takes_value=flag.takes_value, dest=flag.destination, help=flag.help_with_default()
        )
        try:
            group.add_argument(flag.name, *flag.aliases, **about)
        except argparse.ArgumentError:
            # Another package has registered an alias.
            group.add_argument(flag.name, **about)


def parse_fleet_flags(arguments: Sequence[str], prog: str) -> tuple[dict[str, Any], list[str]]:
    """Parse only our flags, without vLLM's slow import; returns `OmniConfig`'s given fields and all other arguments."""
    parser = argparse.ArgumentParser(prog=prog, usage="%(prog)s ...", add_help=False)
    for flag in FLAGS:
        about: dict[str, Any] = {"type": flag.type} if flag.takes_value else {"action": "store_const", "const": True}
        parser.add_argument(flag.name, *flag.aliases, dest=flag.field, **about)
    words = [_OURS.sub(lambda name: name[0].replace("_", "-"), word, count=1) for word in arguments]
    ours, others = parser.parse_known_args(words)
    return {field: value for field, value in vars(ours).items() if value is not None}, others


def patch_parser(parser_class: Any) -> None:
    """Make vLLM's `FlexibleArgumentParser` accept a command line with `--omni-pipeline` and no model. Idempotent."""
    patch_function(parser_class, "parse_args", _parse_args)


def _parse_args(original: Any, parser: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
    """With `--omni-pipeline` no model need be named: parse again with a placeholder."""
    try:
        return original(parser, args, namespace)
    except ValueError:
        words = list(sys.argv[1:] if args is None else args)
        if words[:1] != ["serve"] or not any(map(_PIPELINE.match, _with_config(parser, words))):
            raise
    return original(parser, [words[0], NO_MODEL, *words[1:]], namespace)


def _with_config(parser: Any, words: list[str]) -> list[str]:
    """The arguments, and those of the file that `--config` names."""
    files = words[words.index(CONFIG) + 1 :][:1] if CONFIG in words else []
    return [*words, *(word for file in files for word in parser.load_config_file(file))]
