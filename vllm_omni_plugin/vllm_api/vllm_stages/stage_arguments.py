"""Applies the engine arguments of a pipeline's stage to a parsed command line, with vLLM's own parser.

Flags that are not engine arguments are refused here, flags that no fleet supports by
`integration.options.compatibility`.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_plugin.documents import Place
from vllm_omni_plugin.errors import ConfigError, did_you_mean
from vllm_omni_plugin.pipeline import PipelineError
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser, propagate_flash_late_interaction

DEFAULT_MODEL: str = AsyncEngineArgs.model
"""vLLM's default model."""
_KEY = "engine_args"
_OWN_FLAG = "--omni-"
_NEGATION = "--no-"
_COMMA_SEPARATED = ("--device-ids",)
"""Flags whose lists are given as one comma-separated word, not as JSON."""


class StageArgumentParser:
    """vLLM's parser for the arguments of `vllm serve`, with exceptions in place of exits."""

    def __init__(self) -> None:
        self._parser: Any = make_arg_parser(FlexibleArgumentParser(prog="vllm serve", add_help=False))
        self._parser.error = _raise
        of_engines = {field.name for field in fields(AsyncEngineArgs)}
        # argparse has no public access to its flags.
        self._known: Mapping[str, argparse.Action] = self._parser._option_string_actions
        self._engine_flags = {
            name: action for name, action in self._known.items() if name.startswith("--") and action.dest in of_engines
        }

    def override(self, args: argparse.Namespace, engine_args: Mapping[str, Any]) -> Iterator[Place]:
        """Set the engine arguments of a stage in `args`. Yields the place of each flag in its stage once it is set.

        Their names are those of long flags with underscores; after a dot, a key within the value. Raises PipelineError.
        """
        by_flag: dict[str, dict[str, Any]] = {}
        for key, value in engine_args.items():
            by_flag.setdefault(f"--{key.partition('.')[0].replace('_', '-')}", {})[key] = value
        for flag, given in by_flag.items():
            place = (_KEY, next(iter(given)))
            action = self._engine_flags.get(flag)
            if action is None:
                raise PipelineError(self._refusal(flag), place)
            try:
                for key, value in given.items():
                    if "." not in key and (value is None or action.nargs == 0):
                        setattr(args, action.dest, _switched(flag, action, value))
                self._parser.parse_args([word for key in given for word in _words(flag, key, given[key], action)], args)
            except (ConfigError, ValueError) as error:
                raise PipelineError(str(error), place) from None
            yield place

    def _refusal(self, flag: str) -> str:
        if flag in self._known or flag.startswith(_OWN_FLAG):
            return (
                f"{flag} is not an engine argument: give it on the command line, where it applies to the whole server"
            )
        hint = did_you_mean(flag[2:], [name[2:] for name in self._engine_flags])
        return f"vLLM has no engine argument {flag}{hint}: see vllm serve --help=all"


def _raise(message: str) -> NoReturn:
    raise ConfigError(re.sub("^argument [^:]*: ", "", message))


def _switched(flag: str, action: argparse.Action, value: Any) -> Any:
    """The value of a flag without an argument; null means vLLM's default, even if the command line sets the flag."""
    if value is None:
        return action.default
    if not isinstance(value, bool):
        raise ConfigError(f"must be true or false, not {json.dumps(value)}")
    return value ^ flag.startswith(_NEGATION)


def _words(flag: str, key: str, value: Any, action: argparse.Action) -> Sequence[str]:
    """A value as words of a command line; empty if it is set already."""
    _, dot, part = key.partition(".")
    if dot:
        return [f"{flag}.{part}={json.dumps(value)}"]
    if value is None or action.nargs == 0:
        return []
    if isinstance(value, bool):
        raise ConfigError(f"{json.dumps(value)} is not a valid value of {flag}")
    if isinstance(value, list):
        if action.nargs is not None:
            return [flag, *map(str, value)]
        if flag in _COMMA_SEPARATED:
            return [f"{flag}={','.join(map(str, value))}"]
    return [f"{flag}={json.dumps(value) if isinstance(value, list | dict) else value}"]


def read_engine_args(args: argparse.Namespace) -> Any:
    """vLLM's engine arguments in a parsed command line. Raises ValueError if vLLM does not accept them."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    propagate_flash_late_interaction(args, engine_args)
    return engine_args
