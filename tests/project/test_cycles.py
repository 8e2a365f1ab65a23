"""No module imports itself through others, neither when it is loaded nor later."""

import ast
from collections.abc import Callable, Mapping, Set
from graphlib import CycleError, TopologicalSorter

import pytest

from .import_scan import imported_names
from .source_tree import modules

Graph = Mapping[str, Set[str]]
"""For each module those that it imports."""


def module_of(name: str, known: Set[str]) -> str:
    """The module that a dotted name is, or is in; "" if that is none of ours."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def graph_of(sources: Mapping[str, tuple[str, str]]) -> Graph:
    """The imports among modules, given the text and package of each."""
    return {
        name: {module_of(imported, sources.keys()) for imported in imported_names(text, package)} - {name, ""}
        for name, (text, package) in sources.items()
    }


def all_of(source: str) -> str:
    """A module with the bodies of its functions and what is for types only."""
    return source


def at_once(source: str) -> str:
    """What of a module runs when it is loaded: its text without those two."""

    class Bodies(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            node.body = [ast.Pass()]
            return node

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
            node.body = [ast.Pass()]
            return node

        def visit_If(self, node: ast.If) -> ast.AST:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return ast.Pass()
            return self.generic_visit(node)

    return ast.unparse(Bodies().visit(ast.parse(source)))


@pytest.mark.parametrize("part", [at_once, all_of])
def test_modules_import_each_other_in_no_circle(part: Callable[[str], str]) -> None:
    sources = {name: (part(module.path.read_text()), module.package) for name, module in modules().items()}
    TopologicalSorter(graph_of(sources)).prepare()


@pytest.mark.parametrize(
    ("second", "loaded"),
    [
        pytest.param("from a import x", True, id="when it is loaded"),
        pytest.param("def f():\n import a", False, id="in a function"),
        pytest.param("class C:\n async def f(self):\n  import a", False, id="in a method"),
        pytest.param("if TYPE_CHECKING:\n import a", False, id="for types"),
    ],
)
def test_a_circle_is_seen(second: str, loaded: bool) -> None:
    texts = {"a": "import b", "b": second}
    assert ("a" in graph_of({name: (at_once(text), "") for name, text in texts.items()})["b"]) is loaded
    with pytest.raises(CycleError):
        TopologicalSorter(graph_of({name: (text, "") for name, text in texts.items()})).prepare()
