"""No module imports itself through others, neither when it is loaded nor later."""

import ast
from collections.abc import Iterator, Mapping, Set

import pytest

from .import_scan import imported_names
from .source_tree import modules

Graph = Mapping[str, Set[str]]
"""For each module those that it imports."""

LATER: tuple[tuple[str, ...], ...] = ()
"""Known circles that only imports in functions, or for types, close. Each is a debt: say why it is there."""


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


def at_once(source: str) -> str:
    """What of a module runs when it is loaded: its text without the bodies of functions and what is for types only."""

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


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """The groups of modules that import each other, each sorted (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[tuple[str, ...]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in index:
                yield from visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[-len(group) :]
            if len(group) > 1:
                yield tuple(sorted(group))

    return sorted(group for name in sorted(graph) if name not in index for group in visit(name))


def sources() -> dict[str, tuple[str, str]]:
    return {name: (module.path.read_text(), module.package) for name, module in modules().items()}


def test_modules_import_each_other_in_no_circle_when_they_are_loaded() -> None:
    assert circles(graph_of({name: (at_once(text), package) for name, (text, package) in sources().items()})) == []


def test_imports_in_functions_and_for_types_close_no_circle_but_the_known_ones() -> None:
    assert circles(graph_of(sources())) == sorted(LATER)


@pytest.mark.parametrize(
    ("texts", "loaded", "ever"),
    [
        pytest.param({"a": "import b", "b": "import c", "c": ""}, [], [], id="none"),
        pytest.param({"a": "import b", "b": "from a import x"}, [("a", "b")], [("a", "b")], id="two modules"),
        pytest.param(
            {"a": "import b", "b": "import c", "c": "import a", "d": "import a"},
            [("a", "b", "c")],
            [("a", "b", "c")],
            id="three, and one in front",
        ),
        pytest.param({"a": "import b", "b": "def f():\n import a"}, [], [("a", "b")], id="in a function"),
        pytest.param(
            {"a": "import b", "b": "class C:\n async def f(self):\n  import a"}, [], [("a", "b")], id="in a method"
        ),
        pytest.param({"a": "import b", "b": "if TYPE_CHECKING:\n import a"}, [], [("a", "b")], id="for types"),
        pytest.param({"p": "from p.a import x", "p.a": "import p"}, [("p", "p.a")], [("p", "p.a")], id="package"),
    ],
)
def test_a_circle_is_seen(texts: dict[str, str], loaded: list[tuple[str, ...]], ever: list[tuple[str, ...]]) -> None:
    assert circles(graph_of({name: (at_once(text), "") for name, text in texts.items()})) == loaded
    assert circles(graph_of({name: (text, "") for name, text in texts.items()})) == ever
