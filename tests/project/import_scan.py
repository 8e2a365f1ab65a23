"""What a module imports, wherever in it the import stands."""

import ast
from importlib.util import resolve_name


def imported_names(source: str, package: str) -> set[str]:
    """Return the dotted name of everything imported, as `module` or `module.name`.

    Imports in functions and under TYPE_CHECKING count, and so does `import_module` of a constant.

    Args:
        package: what its relative imports are relative to.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names.update(alias.name for alias in node.names)
            case ast.ImportFrom():
                base = resolve_name("." * node.level + (node.module or ""), package)
                names.update(f"{base}.{alias.name}" for alias in node.names)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if _called_name(node) in _IMPORTING_CALLS:
                names.add(resolve_name(name, package))
    return names


_IMPORTING_CALLS = {"__import__", "import_module"}


def _called_name(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
