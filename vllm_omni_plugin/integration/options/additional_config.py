"""Carries our options through vLLM, under one key of its `additional_config`."""

import copy
import sys
from dataclasses import asdict, fields
from typing import Any, NoReturn

import msgspec

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError

SHARED_DRAIN_FLAG = "omni_drained"
"""Attribute of the parsed arguments of each of several API servers: the argument of `HeadDrain.use_shared_flag`."""

_EXIT_USAGE = 2
_KEY = "vllm_omni_plugin"


def store_options(engine_args: Any, options: OmniConfig) -> None:
    engine_args.additional_config = {**(engine_args.additional_config or {}), _KEY: asdict(options)}


def options_of(vllm_config: Any) -> OmniConfig | None:
    """The options in a `VllmConfig`, or None if none of our flags was given.

    Raises:
        ConfigError: an option is unknown or its value has a wrong type.
    """
    additional = vllm_config.additional_config
    plain = additional.get(_KEY) if isinstance(additional, dict) else None
    if plain is None:
        return None
    # A user may write them there instead of giving flags.
    if not isinstance(plain, dict):
        raise ConfigError(f"argument --additional-config: '{_KEY}' must be an object with options, not {plain!r}")
    if unknown := plain.keys() - {field.name for field in fields(OmniConfig)}:
        names = ", ".join(map(repr, sorted(unknown)))
        raise ConfigError(f"argument --additional-config: '{_KEY}' has unknown options: {names}")
    try:
        return msgspec.convert(plain, OmniConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"argument --additional-config: '{_KEY}': {error}") from None


def without_options(vllm_config: Any) -> Any:
    """A copy without our options, for engines: they do not need them, and vLLM's compile cache depends on them."""
    config = copy.copy(vllm_config)
    if isinstance(config.additional_config, dict):
        config.additional_config = {key: value for key, value in config.additional_config.items() if key != _KEY}
    return config


def exit_usage_error(error: ConfigError, program: str = "vllm serve") -> NoReturn:
    """Exit like argparse does for wrong arguments. `program`: the command that the user typed."""
    sys.stderr.write(f"{program}: error: {error}\n")
    raise SystemExit(_EXIT_USAGE) from None
