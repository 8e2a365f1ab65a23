"""No module imports itself through others, neither when it is loaded nor later."""

from collections.abc import Mapping, Set
from graphlib import TopologicalSorter

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


def test_modules_import_each_other_in_no_circle() -> None:
    sources = {name: (module.path.read_text(), module.package) for name, module in modules().items()}
    TopologicalSorter(graph_of(sources)).prepare()
