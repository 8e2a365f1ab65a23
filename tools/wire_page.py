"""Writes the lists of messages in docs/wire.md, from the docstrings of the messages' structs.

python -m tools.wire_page
"""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from msgspec import Struct

from vllm_omni_plugin.coordinator.protocol import control_messages, head_messages
from vllm_omni_plugin.replicas.control import lease_messages

PAGE = Path(__file__).parents[1] / "docs" / "wire.md"
_BEGIN, _END = "<!-- made by python -m tools.wire_page -->\n", "<!-- end of what is made -->\n"
LISTS: dict[str, tuple[type[Struct], ...]] = {
    "From replicas, nodes and heads to the coordinator": (
        control_messages.ReplicaEvent,
        head_messages.HeadQuery,
        *get_args(head_messages.FromHead),
    ),
    "From the coordinator": (control_messages.ReplicaList, head_messages.HeadInfo, *get_args(head_messages.ToHead)),
    "From a head to a replica server": get_args(lease_messages.ToServer),
    "From a replica server to a head": get_args(lease_messages.FromServer),
}


def page(text: str) -> str:
    """The page's text with its lists of messages written anew."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    listed: list[type[Struct]] = []
    lists = "".join(_list(title, structs, listed) for title, structs in LISTS.items())
    return f"{before}{_BEGIN}{lists}\n{_END}{after}"


def _list(title: str, structs: Iterable[type[Struct]], listed: list[type[Struct]]) -> str:
    rows = []
    for struct in structs:
        rows.append(f"- `{struct.__name__}`: see above.\n" if struct in listed else _row(struct))
        listed.append(struct)
    return f"\n### {title}\n\n{''.join(rows)}"


def _row(struct: type[Struct]) -> str:
    meaning, *further = (" ".join(part.split()) for part in (inspect.getdoc(struct) or "").split("\n\n"))
    (if_lost,) = (part.removeprefix("If lost: ") for part in further if part.startswith("If lost: "))
    meaning = re.sub(r"^(Head|Server) to (server|head): ", "", meaning)
    return f"- `{struct.__name__}`: {meaning} *Lost*: {if_lost}\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
