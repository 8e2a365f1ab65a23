"""What is used of vLLM, read from source texts: by our modules, and by AsyncLLM of its engine client."""

import ast
from collections.abc import Iterator


def vllm_names(source: str) -> set[str]:
    """Return the dotted names that a module imports from vLLM, and the attributes it takes directly off these or
    extends."""
    tree = ast.parse(source)
    imported = dict(_imports(tree))
    attributes = {
        f"{imported[node.value.id]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported
    }
    patched = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="patch_function"), args=[ast.Name(id=owner), ast.Constant(value=str(name)), *_]
            ) if owner in imported:
                patched.add(f"{imported[owner]}.{name}")
    return set(imported.values()) | attributes | patched


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_vllm(node.module or ""):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_vllm(alias.name):
                    yield alias.asname or alias.name, alias.name


def _is_vllm(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def names_of(source: str) -> set[str]:
    """Return every identifier, attribute, keyword and string of a module: all ways to use something by its name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.alias(name=name):
                names.add(name)
            case ast.Constant(value=str(name)):
                names.add(name)
    return names


def called_by_name(source: str, callers: frozenset[str]) -> set[str]:
    """Return the constant first arguments of calls to methods named in `callers`."""
    called: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr=caller), args=[ast.Constant(value=str(name)), *_]) if (
                caller in callers
            ):
                called.add(name)
    return called
