"""Checks the values of policy options. Every message names the option, the value and the range.

Constructors of policies call these functions. `registry.py` refuses unknown option names.
"""

import math
import sys

from vllm_omni_plugin.errors import ConfigError


def number(name: str, value: object, minimum: float, maximum: float = math.inf) -> float:
    """Return `value`. Raises ConfigError if it is no finite number from `minimum` to `maximum`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ConfigError(f"option {name}: {value!r} is not a number")
    if not minimum <= value <= maximum:
        allowed = f"from {minimum} to {maximum}" if maximum < math.inf else f"of {minimum} or more"
        raise ConfigError(f"option {name}: {value} is out of range: give a number {allowed}")
    return float(value)


def whole(name: str, value: object) -> int:
    """Return `value`. Raises ConfigError if it is no whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"option {name}: {value!r} is not a whole number")
    return value
