"""Checks of the options that users give to policies. Every message names the option, the value and the range.

Constructors of policies call them for values. Unknown names are refused in `registry.py`, which builds each policy once
at the start: for flags it is called by `flag_rules.check_policy`, for a pipeline's file by `stage_checks.py`.
"""

import math
import sys

from vllm_omni_plugin.errors import ConfigError


def number(name: str, value: object, minimum: float, maximum: float = math.inf) -> float:
    """`value` as a number from `minimum` to `maximum`. Raises ConfigError naming `name` if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ConfigError(f"option {name}: {value!r} is not a number")
    _require_range(name, value, minimum, maximum)
    return float(value)


def whole(name: str, value: object, minimum: float = -math.inf, maximum: float = math.inf) -> int:
    """`value` as a whole number from `minimum` to `maximum`. Raises ConfigError naming `name` if it is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"option {name}: {value!r} is not a whole number")
    _require_range(name, value, minimum, maximum)
    return value


def _require_range(name: str, value: float, minimum: float, maximum: float) -> None:
    if not minimum <= value <= maximum:
        allowed = f"from {minimum} to {maximum}" if maximum < math.inf else f"of {minimum} or more"
        raise ConfigError(f"option {name}: {value} is out of range: give a number {allowed}")
