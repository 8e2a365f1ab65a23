"""docs/map.md names files and what they define."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .source_tree import PACKAGE, ROOT

PAGE = (ROOT / "docs" / "map.md").read_text()
_PLACES = [row.split(" | ")[1] for row in PAGE.splitlines() if ".py`" in row]


def defined(path: Path) -> set[str]:
    """The names that a module defines, and those in its classes as `Class.name`."""
    return set(_names(ast.parse(path.read_text()).body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef():
                yield node.name
                yield from (f"{node.name}.{name}" for name in _names(node.body))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_every_file_and_name_of_the_map_exists() -> None:
    missing = []
    for place in _PLACES:
        file = ""
        for quoted in re.findall(r"`([^`]+)`", place):
            if quoted.endswith(".py"):
                file = quoted
                names = defined(path) if (path := ROOT / PACKAGE / file).is_file() else {""}
            if (quoted != file or names == {""}) and quoted not in names:
                missing.append(f"{file}: {quoted}")
    assert len(_PLACES) >= 60
    assert missing == []
