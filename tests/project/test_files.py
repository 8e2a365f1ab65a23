"""The files: small, documented, complete, and free of what only one machine knows."""

import ast
import re
import tomllib
from collections import Counter

from .source_tree import PACKAGE, PACKAGE_FOLDERS, ROOT, modules, packages, python_files, relative, text_files

MAX_LINES = 400
MAX_MODULES = 12
"""In one folder of the package, `__init__.py` not counted."""
MACHINE_PATH = re.compile(r"(?<![\w~})])/(?:work|tmp/dev)(?![\w-])")
"""A folder of the machine the project is developed on. Not one below another folder or a variable: `$HOME/work`."""


def stray_statements(source: str) -> list[str]:
    """Return the statements of an `__init__.py` that are no docstring, import or `__all__`."""
    module = ast.parse(source)
    statements = module.body if ast.get_docstring(module) is None else module.body[1:]
    return [ast.unparse(statement) for statement in statements if not _is_import_or_all(statement)]


def _is_import_or_all(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.AnnAssign(target=ast.Name(id="__all__")):
            return True
    return False


def test_no_python_file_is_longer_than_the_limit() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in python_files()}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_folder_of_the_package_holds_too_many_modules() -> None:
    folders = Counter(module.path.parent for module in modules().values() if module.path.name != "__init__.py")
    assert {relative(folder): count for folder, count in folders.items() if count > MAX_MODULES} == {}


def test_no_two_modules_of_the_package_have_the_same_name() -> None:
    names = Counter(module.path.name for module in modules().values() if module.path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_package_files_hold_only_docstring_imports_and_all() -> None:
    files = [module.path for module in modules().values() if module.path.name == "__init__.py"]
    found = {relative(path): stray_statements(path.read_text()) for path in files}
    assert {path: statements for path, statements in found.items() if statements} == {}


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {module.path.parent for module in modules().values()}
    assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_packages_that_are_installed_are_those_of_the_tree() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(packages())
    moved = {name: ROOT / folder for name, folder in setuptools["package-dir"].items()}
    assert {PACKAGE: ROOT / PACKAGE, **moved} == PACKAGE_FOLDERS


def test_no_text_names_a_folder_of_the_developers_machine() -> None:
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []
