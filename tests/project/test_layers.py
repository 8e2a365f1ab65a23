"""The layers: imports point down and in no circle, and vLLM is touched in two places only."""

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import TopologicalSorter

import pytest

from .import_scan import imported_names
from .source_tree import PACKAGE, modules, packages, python_files, relative

LAYERS = (
    "entrypoints",
    "cli",
    "ray",
    "sim",
    "integration",
    "admin",
    "stages",
    "orchestrator",
    "replicas",
    "coordinator",
    "vllm_api",
    "admission",
    "balancing",
    "pipeline",
)
"""From top to bottom."""

FOUNDATION = (
    "errors",
    "config",
    "keep_running",
    "other_loop",
    "logger",
    "cli_values",
    "private_files",
    "curve",
    "documents",
)
"""Modules and packages below all layers, which anyone may import."""

KNOW_VLLM = {"integration", "vllm_api"}
LIGHT = {"coordinator", "admission", "balancing", "pipeline"}
"""Start in milliseconds, so they may not even reach vLLM or torch through another module of ours."""

Imports = Mapping[str, set[str]]
"""For each module, by its dotted name, the dotted names it imports."""


@cache
def imports() -> Imports:
    return {name: imported_names(module.path.read_text(), module.package) for name, module in modules().items()}


def layer_of(name: str) -> str:
    """Return the layer or foundation module that a dotted name belongs to: "" for the package itself or another's."""
    top, _, rest = name.partition(".")
    layer = rest.partition(".")[0]
    return layer if top == PACKAGE and layer in {*LAYERS, *FOUNDATION} else ""


def depth(layer: str) -> int:
    return LAYERS.index(layer) if layer in LAYERS else len(LAYERS)


def upward(imports: Imports) -> list[str]:
    return [
        f"{importer} imports {name}"
        for importer, names in imports.items()
        for name in sorted(names)
        if name.partition(".")[0] == PACKAGE and depth(layer_of(name)) < depth(layer_of(importer))
    ]


def outside(imports: Imports, distribution: str, allowed: Iterable[str]) -> list[str]:
    """Return the imports of another's package by modules of other layers than the allowed ones."""
    return [
        f"{importer} imports {name}"
        for importer, names in imports.items()
        for name in sorted(names)
        if name.partition(".")[0] == distribution and layer_of(importer) not in allowed
    ]


def reached(imports: Imports, start: Iterable[str]) -> set[str]:
    """Return all dotted names that importing the modules `start` imports, at once or later."""
    seen: set[str] = set()
    pending = set(start)
    while pending:
        name = pending.pop()
        seen.add(name)
        parents = {name.rpartition(".")[0]} - {""}
        pending |= (imports.get(name, set()) | parents) - seen
    return seen


def test_every_module_is_in_a_layer_or_in_the_foundation() -> None:
    assert [name for name in modules() if name != PACKAGE and not layer_of(name)] == []


def test_imports_point_down() -> None:
    assert upward(imports()) == []


def test_vllm_is_imported_in_two_layers_only() -> None:
    assert outside(imports(), "vllm", KNOW_VLLM) == []


def test_light_layers_reach_neither_vllm_nor_torch() -> None:
    names = reached(imports(), [name for name in imports() if layer_of(name) in LIGHT])
    assert {name.partition(".")[0] for name in names} & {"vllm", "torch"} == set()


def folder_graph(imports: Imports, layer: str) -> dict[str, set[str]]:
    """Return what each folder of a layer, or module directly in it, imports of the others."""
    prefix = f"{PACKAGE}.{layer}."
    graph: dict[str, set[str]] = {}
    for importer, names in imports.items():
        if importer.startswith(prefix):
            folder = importer.removeprefix(prefix).partition(".")[0]
            others = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
            graph.setdefault(folder, set()).update(others - {folder})
    return graph


def module_of(name: str) -> str:
    """Return the module that a dotted name is, or is in: "" if that is none of ours."""
    while name and name not in imports():
        name = name.rpartition(".")[0]
    return name


def test_modules_import_each_other_in_no_cycle() -> None:
    graph = {importer: {module_of(name) for name in names} - {importer, ""} for importer, names in imports().items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("layer", LAYERS)
def test_folders_of_a_layer_import_each_other_in_no_cycle(layer: str) -> None:
    TopologicalSorter(folder_graph(imports(), layer)).prepare()


def folders_of_one_name(packages: Iterable[str]) -> list[list[str]]:
    """Return the packages that have their last name in common."""
    by_name: dict[str, list[str]] = {}
    for package in sorted(packages):
        by_name.setdefault(package.rpartition(".")[2], []).append(package)
    return [found for found in by_name.values() if len(found) > 1]


def test_a_name_in_two_layers_is_found() -> None:
    assert folders_of_one_name({"p", "p.a", "p.b", "p.a.c", "p.b.c"}) == [["p.a.c", "p.b.c"]]


def test_no_folder_name_is_in_two_layers() -> None:
    assert folders_of_one_name(packages()) == []


def exported(package: str) -> dict[tuple[str, str], str]:
    """What a layer's `__init__` takes from its modules: the layer, by the module and the name."""
    tree = ast.parse(modules()[package].path.read_text())
    imports = [each for each in tree.body if isinstance(each, ast.ImportFrom) and each.module]
    return {
        (each.module, alias.name): package
        for each in imports
        for alias in each.names
        if each.module and each.module.startswith(f"{package}.")
    }


def second_homes(source: str, package: str, exports: Mapping[tuple[str, str], str]) -> list[str]:
    """The names that a module of `package` imports from a module of another layer, although that layer exports them."""
    return [
        f"{alias.name} from {node.module}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (layer := exports.get((node.module or "", alias.name))) and not f"{package}.".startswith(f"{layer}.")
    ]


def test_a_second_home_is_found() -> None:
    exports = {("p.a.b", "C"): "p.a"}
    assert second_homes("def f():\n    from p.a.b import C, D", "p.x", exports) == ["C from p.a.b"]
    assert (
        second_homes("from p.a import C", "p.x", exports) == second_homes("from p.a.b import C", "p.a.y", exports) == []
    )


def test_what_a_layer_exports_is_imported_from_the_layer_elsewhere() -> None:
    exports: dict[tuple[str, str], str] = {}
    for layer in packages():
        exports |= exported(layer) if layer.count(".") == 1 else {}
    by_path = {module.path: module.package for module in modules().values()}
    sources = {path: path.read_text() for path in python_files()}
    # Most import none of those modules, and parsing takes time.
    found = {
        relative(path): second_homes(source, by_path.get(path, relative(path.parent)), exports)
        for path, source in sources.items()
        if any(module in source for module, _ in exports)
    }
    assert {path: names for path, names in found.items() if names} == {}
