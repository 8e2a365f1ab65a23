"""Carries our options through vLLM, under one key of its `additional_config`."""

import copy
import sys
from dataclasses import asdict
from typing import Any, NoReturn

import msgspec

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError

SHARED_DRAIN_FLAG = "omni_drained"
"""Attribute of the parsed arguments of each of several API servers: the argument of `HeadDrain.use_shared_flag`."""

LOCAL_ADMIN_KEY = "omni_local_admin_key"
"""Attribute of the parsed arguments of each of several API servers: the key that `publish_local_key` returned."""

_EXIT_USAGE = 2
_KEY = "vllm_omni_plugin"


def store_options(engine_args: Any, options: OmniConfig) -> None:
    engine_args.additional_config = {**(engine_args.additional_config or {}), _KEY: asdict(options)}


def refuse_options_of_user(engine_args: Any) -> None:
    """Raise `ConfigError` if a user wrote options where only `store_options` puts them: they enable nothing."""
    if _KEY in _additional(engine_args):
        raise ConfigError(f"argument --additional-config: '{_KEY}' is not for users: give the --omni-* flags instead")


def options_of(vllm_config: Any) -> OmniConfig | None:
    """The options in a `VllmConfig`, or None if none of our flags was given."""
    plain = _additional(vllm_config).get(_KEY)
    return None if plain is None else msgspec.convert(plain, OmniConfig)


def _additional(config: Any) -> dict[str, Any]:
    # It may also be an object of a platform.
    return config.additional_config if isinstance(config.additional_config, dict) else {}


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
