"""docs/troubleshooting.md quotes messages that the code has."""

import ast
import re

from .source_tree import ROOT, modules

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^> `(.+)`$", PAGE, re.MULTILINE)
_GAP = "\0"


def texts(source: str) -> set[str]:
    """All texts in a module's code, with a gap for each value that is formatted into them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(str(part.value) if isinstance(part, ast.Constant) else _GAP for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(re.sub(r"%(\(\w+\))?(\.\d)?[sdrf]", _GAP, node.value))
    return found


def is_said(message: str, said: set[str]) -> bool:
    """Whether a text of the code gives this message, or one that contains it."""
    parts = [re.escape(part) for part in message.split("...")]
    pattern = re.compile(f".*{_GAP}.*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in said)


def test_every_message_is_one_of_the_code() -> None:
    said = set().union(*(texts(module.path.read_text()) for module in modules().values()))
    assert len(QUOTED) > 25
    assert [message for message in QUOTED if not is_said(message, said)] == []
