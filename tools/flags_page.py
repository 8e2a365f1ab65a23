"""Writes docs/flags.md, the list of our flags, from the table that the parser is made of.

python -m tools.flags_page
"""

import json
from pathlib import Path
from typing import Any

from vllm_omni_plugin.config import FLAGS, Flag, Side

PAGE = Path(__file__).parents[1] / "docs" / "flags.md"
_INTRODUCTION = """\
# Flags

Any of these switches the fleet on; without any, `vllm serve` is what it was. They also work in `--config` files, and
`vllm serve --help=OmniConfig` shows them. *Head* is a process that takes HTTP requests, *node* one with `--headless`.
In brackets: where a flag is for one of the two only, and its default. vLLM's flags:
[refused ones](behaviour.md#vllm-flags-that-a-fleet-refuses).

"""
_ON = {Side.HEAD: "head; ", Side.HEADLESS: "node; ", Side.BOTH: ""}


def page() -> str:
    """The whole page."""
    return _INTRODUCTION + "".join(map(_row, FLAGS))


def _row(flag: Flag) -> str:
    value = f" {flag.metavar}" if flag.takes_value else ""
    names = ", ".join([f"`{flag.name}{value}`", *(f"`{alias}`" for alias in flag.aliases)])
    meaning = flag.help.replace("%%", "%")
    return f"- {names} ({_ON[flag.side]}{_shown(flag.default)}): {meaning}\n"


def _shown(default: Any) -> str:
    match default:
        case None:
            return "none"
        case False:
            return "off"
        case str():
            return f"`{default}`"
        case float():
            return f"{default:g}"
    return json.dumps(default)


if __name__ == "__main__":
    PAGE.write_text(page())
