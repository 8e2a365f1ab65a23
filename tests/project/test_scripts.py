"""Scripts use no private names of the package, and tests do not poll."""

import ast
from collections.abc import Callable, Iterable, Iterator

from .source_tree import ROOT, modules, python_files, relative

SCRIPTS = {"tests", "benchmarks", "tools", "examples"}
OF_VLLM = {"tests/contract/test_spawning.py: _wait_for_zmq_addrs"}
"""Private names of vLLM that the package overrides."""
WAITS = {
    "tests/fakes/conditions.py: repeated",
    "tests/coordinator/coordinator_support.py: eventually",
    "tests/engine/server.py: until",
}
"""The functions that wait for a peer or process that raises no event here."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> set[str]:
    """The private names that a module defines: functions, classes, constants and attributes of `self` and `cls`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), attr=name):
                names.add(name)
    return set(filter(is_private, names))


def used(tree: ast.AST) -> Iterator[str]:
    """The private names of others that a module reads, imports or replaces."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("self" | "cls" | "os") | ast.Call(ast.Name("super"))):
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.Call(ast.Name("getattr" | "setattr" | "hasattr") | ast.Attribute(attr="setattr"), arguments):
                yield from (
                    each.value.rpartition(".")[2]
                    for each in arguments
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                )


def reads_private(source: str, of_package: set[str]) -> list[str]:
    """The package's private names that a script uses; those that it defines itself are its own."""
    tree = ast.parse(source)
    return sorted({name for name in used(tree) if name in of_package} - defined(tree))


def polls(source: str) -> list[str]:
    """The functions with a loop around a fixed sleep, which is more than a turn of the event loop."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            loops = (node for node in own_nodes(function) if isinstance(node, ast.While | ast.For | ast.AsyncFor))
            if any(is_fixed_sleep(node) for loop in loops for node in own_nodes(loop)):
                found.append(function.name)
    return found


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below this one, without those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from own_nodes(child)


def is_fixed_sleep(node: ast.AST) -> bool:
    match node:
        case ast.Call(ast.Name("sleep") | ast.Attribute(attr="sleep"), [ast.Constant(value=0)]):
            return False
        case ast.Call(ast.Name("sleep") | ast.Attribute(attr="sleep"), [seconds]):
            return not any(isinstance(part, ast.Call) for part in ast.walk(seconds))
    return False


def findings(find: Callable[[str], Iterable[str]], folders: set[str]) -> set[str]:
    return {
        f"{relative(path)}: {name}"
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in folders
        for name in find(path.read_text())
    }


def test_a_private_name_of_the_package_is_found() -> None:
    of_package = {"_machines", "_other"}
    for source in (
        "server._machines.append(1)",
        "from vllm_omni_plugin.x import _machines",
        "patch.setattr(x, '_machines', 1)",
        "patch.setattr('vllm_omni_plugin.x._machines', 1)",
        "class A:\n    def f(self):\n        self._other, server._machines",
    ):
        assert reads_private(source, of_package) == ["_machines"]
    for source in ("os._exit(1)", "self._machines", "super()._machines()", "def _machines(): ...\nx._machines()"):
        assert reads_private(source, of_package) == []


def test_no_script_uses_private_names_of_the_package() -> None:
    of_package = {name for module in modules().values() for name in defined(ast.parse(module.path.read_text()))}
    assert findings(lambda source: reads_private(source, of_package), SCRIPTS) == OF_VLLM


def test_a_poll_is_found() -> None:
    loops = "while not ready():\n        {}", "for _ in range(9):\n        if ready(): break\n        {}"
    for loop in loops:
        for sleep in ("time.sleep(0.1)", "await asyncio.sleep(0 if busy else PAUSE)"):
            assert polls(f"async def f():\n    {loop.format(sleep)}") == ["f"]
        for sleep in ("await asyncio.sleep(0)", "await asyncio.sleep(chance.random())", "ready.wait(1)"):
            assert polls(f"async def f():\n    {loop.format(sleep)}") == []


def test_only_functions_that_wait_for_a_peer_or_process_poll() -> None:
    assert findings(polls, {"tests"}) == WAITS
