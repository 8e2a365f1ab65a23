"""docs/map.md has a place for every module, and names only what there is."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vllm_omni_plugin.config import FLAGS

from .source_tree import PACKAGE, ROOT

_MAP = (ROOT / "docs" / "map.md").read_text()
_ROWS = [row for row in _MAP.splitlines() if row.startswith("- ")]
_PLACE = re.compile(r"`([\w/]+\.(?:py|js|json))(?::([^`]+))?`((?:, `(?![\w/]+\.(?:py|js|json)\b)[^`]+`)*)")
_STEP = "→"
_QUOTED = re.compile(r"`([^`]+)`")
_LIMIT = re.compile(r"(?<=[`:,])(_?[A-Z][A-Z_]+)=([^`,]+)")
_CLASS_OR_METHOD = re.compile(r"[A-Z]\w*[a-z]\w*(\.\w+)?")


@cache
def defined(path: Path) -> dict[str, ast.expr | None]:
    """The names that a module defines, and those in its classes as `Class.name`; with the values of assigned ones."""
    return dict(_names(ast.parse(path.read_text()).body))


def _names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    for node in body:
        match node:
            case ast.ClassDef():
                yield node.name, None
                yield from ((f"{node.name}.{name}", value) for name, value in _names(node.body))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, None
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from ((target.id, node.value) for target in targets if isinstance(target, ast.Name))


def places(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each file that a text names, and what it says of it."""
    for file, name, more in _PLACE.findall(text):
        yield file, [name for quoted in [name, *_QUOTED.findall(more)] for name in quoted.split(",") if name]


def modules() -> dict[str, Path]:
    package = ROOT / PACKAGE
    return {str(path.relative_to(package)): path for path in package.rglob("*.py") if path.name != "__init__.py"}


def number(text: str) -> float:
    """The value of an expression of numbers, such as `192 * 1024`."""
    return float(eval(compile(text, "number", "eval"), {"__builtins__": {}}))


def test_every_module_is_in_the_map() -> None:
    assert sorted(modules().keys() - {file for file, _ in places(_MAP)}) == [], "give each a row in docs/map.md"


def test_every_flag_is_in_the_map() -> None:
    assert sorted({flag.name for flag in FLAGS} - set(_QUOTED.findall(_MAP))) == [], "give each a row in docs/map.md"


def test_every_file_and_name_of_the_map_exists() -> None:
    everywhere = {name for path in modules().values() for name in defined(path)}
    missing = []
    for file, names in places(_MAP):
        path = next((folder / file for folder in (ROOT / PACKAGE, ROOT) if (folder / file).is_file()), None)
        if path is None:
            missing.append(file)
        elif names:
            missing += [f"{file}:{name}" for name in names if _steps(name)[0] not in defined(path)]
    for row in _ROWS:
        quoted = ",".join(_QUOTED.findall(_PLACE.sub("", row))).split(",")
        missing += [name for name in quoted if _CLASS_OR_METHOD.fullmatch(name) and name not in everywhere]
        missing += [f"{step} in a path" for path in _paths(row) for step in path if step not in everywhere]
    assert missing == []


def test_the_map_says_in_which_file_each_step_of_a_path_is() -> None:
    known = modules()
    said = {_steps(name)[0].partition(".")[0] for file, names in places(_MAP) if file in known for name in names}
    unplaced = set()
    for row in _ROWS:
        in_row = {name for file, _ in places(row) if file in known for name in defined(known[file])}
        unplaced |= {step.partition(".")[0] for path in _paths(row) for step in path} - said - in_row
    assert sorted(unplaced) == []


def _paths(row: str) -> list[list[str]]:
    names = [name for quoted in _QUOTED.findall(row) for name in quoted.rpartition(":")[2].split(",")]
    return [_steps(name) for name in names if _STEP in name]


def _steps(path: str) -> list[str]:
    """The names of a path of calls, `first→second`; or one name, without its value."""
    return path.partition("=")[0].split(_STEP)


def test_a_limit_has_the_value_that_the_map_says() -> None:
    known, wrong = modules(), []
    for row in _ROWS:
        in_files = [defined(known[file]) for file, _ in places(row) if file in known]
        for name, said in _LIMIT.findall(row):
            values = [names[name] for names in in_files if name in names]
            if not any(value is not None and number(ast.unparse(value)) == number(said) for value in values):
                wrong.append(f"{name} is not {said} in a file of its row")
    assert wrong == []
