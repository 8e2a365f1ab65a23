"""vLLM's parser for the arguments of `vllm serve`."""

import argparse
from collections.abc import Callable, Sequence

from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_plugin.vllm_api.versions.differences import CLI_ARGS_MOVED

if CLI_ARGS_MOVED.applies:
    from vllm.entrypoints.common.cli_args import make_arg_parser, propagate_flash_late_interaction
else:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, propagate_flash_late_interaction

__all__ = ["make_arg_parser", "parse_headless_args", "propagate_flash_late_interaction"]


def parse_headless_args(
    arguments: Sequence[str],
    prog: str,
    description: str,
    epilog: str,
    add_flags: Callable[[argparse.ArgumentParser], None],
) -> argparse.Namespace:
    """Parse arguments of `vllm serve --headless`, with the flags of plugins and those that `add_flags` adds."""
    # An error prints the usage, which would be 300 lines with each flag of vLLM.
    usage = "%(prog)s [MODEL] [ARGUMENTS OF vllm serve MODEL --headless]; more with --help"
    parser = make_arg_parser(FlexibleArgumentParser(prog=prog, usage=usage, description=description, epilog=epilog))
    add_flags(parser)
    args: argparse.Namespace = parser.parse_args(list(arguments))
    args.model = args.model_tag or args.model
    args.headless = True
    return args
