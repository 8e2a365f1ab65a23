"""vLLM's own parser for the arguments of `vllm serve`, for commands that take the same ones."""

import argparse
from collections.abc import Callable, Sequence

from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser


def parse_headless_args(
    arguments: Sequence[str],
    prog: str,
    description: str,
    epilog: str,
    add_flags: Callable[[argparse.ArgumentParser], None],
) -> argparse.Namespace:
    """Parse arguments as `vllm serve --headless` gets them, plugins' flags included.

    Args:
        add_flags: adds what the command takes beyond that.
    """
    parser = make_arg_parser(FlexibleArgumentParser(prog=prog, description=description, epilog=epilog))
    add_flags(parser)
    args: argparse.Namespace = parser.parse_args(list(arguments))
    args.model = args.model_tag or args.model
    args.headless = True
    return args
