"""Finds a symbol of the installed vLLM, and whether it can still be called as we call it."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from vllm_omni_plugin.vllm_api.versions.supported import Release, release_of

_LINE = r"^(?:(since|before) ([\d.]+) )?([\w.]+): (.*(?:\n .*)*)"


class Symbol(NamedTuple):
    """One thing of vLLM's that we name, read, call or replace.

    Attributes:
        path: its dotted path; the last part may be an attribute that exists on instances only.
        used_for: what would no longer work without it.
        positional: names of the parameters we pass by position, in order; None for what is not called.
        keywords: names of the parameters we pass by name.
        since: the first release of vLLM that has it; None: all have.
        before: the first that does not; None: all have.
    """

    path: str
    used_for: str
    positional: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()
    since: Release | None = None
    before: Release | None = None

    def is_of(self, release: Release) -> bool:
        return (self.since is None or release >= self.since) and (self.before is None or release < self.before)


def read_symbols(text: str) -> Iterator[Symbol]:
    for section in re.split(r"^\[", text, flags=re.MULTILINE)[1:]:
        used_for, _, lines = section.partition("]\n")
        for bound, release, owner, names in re.findall(_LINE, lines, re.MULTILINE):
            limits = {bound: release_of(release)} if bound else {}
            for name, call in re.findall(r"(\w+)(\([^)]*\))?", names):
                positional, _, keywords = call.partition("*")
                passed = _words(positional) if call else None
                yield Symbol(f"{owner}.{name}", used_for, passed, _words(keywords), **limits)


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text))


class BrokenSymbolError(AssertionError):
    """A symbol is not what we take it for."""


def check(symbol: Symbol) -> None:
    """Resolve the symbol, and bind the arguments we pass to its signature.

    Raises:
        BrokenSymbolError: naming the symbol, what is wrong with it and what it is used for.
    """
    try:
        found, called = _resolve(symbol.path)
        if symbol.positional is not None:
            _bind(found, called, symbol.positional, symbol.keywords)
    except (ImportError, AttributeError, TypeError) as error:
        raise BrokenSymbolError(f"{symbol.path}: {error} (used for: {symbol.used_for})") from error


def _resolve(path: str) -> tuple[Any, bool]:
    """Return what the path names, None for an attribute of instances, and whether a call of it passes `self` unseen."""
    owner, names = _deepest_module(path)
    for position, name in enumerate(names):
        if position == len(names) - 1 and inspect.isclass(owner):
            return _class_attribute(owner, name)
        owner = getattr(owner, name)
    return owner, False


def _deepest_module(path: str) -> tuple[Any, list[str]]:
    module: ModuleType = import_module(path.partition(".")[0])
    names = path.split(".")[1:]
    while names:
        child = f"{module.__name__}.{names[0]}"
        try:
            module = import_module(child)
        except ModuleNotFoundError as error:
            if error.name != child and hasattr(module, "__path__"):
                # It is there, and needs something that is not.
                raise
            break
        names.pop(0)
    return module, names


def _class_attribute(owner: type, name: str) -> tuple[Any, bool]:
    if hasattr(owner, name):
        return getattr(owner, name), isinstance(inspect.getattr_static(owner, name), FunctionType)
    if any(name in vars(base).get("__annotations__", {}) or name in assigned_on_self(base) for base in owner.__mro__):
        return None, False
    raise AttributeError(f"class {owner.__name__} has no attribute {name!r}")


def assigned_on_self(owner: type) -> set[str]:
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):
        return set()
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
    }


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _bind(found: Any, unbound: bool, positional: tuple[str, ...], keywords: tuple[str, ...]) -> None:
    signature = inspect.signature(found)
    parameters = list(signature.parameters)[1 if unbound else 0 :]
    if tuple(parameters[: len(positional)]) != positional:
        raise TypeError(f"takes {parameters}, we pass {list(positional)} by position")
    arguments = ([None] if unbound else []) + [None] * len(positional)
    signature.bind(*arguments, **dict.fromkeys(keywords))
