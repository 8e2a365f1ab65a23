"""Checks of command lines of heads and nodes."""

from collections.abc import Sequence

from vllm_omni_plugin.config import FLAGS, Side

KEEP_ALIVE = str(3660)
"""Seconds that a head keeps an idle connection open: longer than Envoy, whose hour is the longest of common proxies."""

_OURS = {flag.name: flag for flag in FLAGS}


def flags_of(command: Sequence[str]) -> dict[str, str]:
    """The flags of a command line with their values; "" without one."""
    found: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], "--"], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = value if equals or following.startswith("--") else following
    return found


def faults(command: Sequence[str]) -> list[str]:
    """The faults for which this plugin would refuse a command line."""
    flags = flags_of(command)
    side = Side.HEADLESS if "--headless" in flags else Side.HEAD
    found = []
    for name, value in flags.items():
        if not name.startswith("--omni-"):
            continue
        flag = _OURS.get(name)
        if flag is None:
            found.append(f"{name} is no flag")
        elif flag.side not in (side, Side.BOTH):
            found.append(f"{name} is not for a {side.value}")
        elif flag.takes_value != bool(value):
            found.append(f"{name} {value!r}")
        elif flag.type is not None and not value.startswith("$"):
            flag.type(value)
    return found
