"""The installed vLLM has everything we use of it, everything we use of it is listed, and our client misses nothing."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient

import vllm_omni_plugin
from vllm_omni_plugin.integration.engine_client.fleet_client import FleetClient

from .resolution import Symbol, check, read_symbols
from .usage import called_by_name, names_of, vllm_names

SYMBOLS = list(read_symbols(Path(__file__).with_name("symbols.txt").read_text()))
PACKAGE = Path(vllm_omni_plugin.__file__).parent
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
KNOW_VLLM = {"vllm_api", "integration"}
TOUCH_VLLM = {path: text for path, text in SOURCES.items() if path.relative_to(PACKAGE).parts[0] in KNOW_VLLM}
CALLERS = frozenset({"_call", "_call_model", "_call_prompt", "_call_stages", "_consensus"})


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: symbol.path)
def test_symbol_is_what_we_take_it_for(symbol: Symbol) -> None:
    check(symbol)


def test_no_symbol_is_listed_twice() -> None:
    paths = [symbol.path for symbol in SYMBOLS]
    assert [path for path in paths if paths.count(path) > 1] == []


def test_every_name_taken_from_vllm_is_listed() -> None:
    listed = {symbol.path for symbol in SYMBOLS}
    unlisted = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, text in TOUCH_VLLM.items()
        for name in vllm_names(text)
        if name not in listed and not any(other.startswith(f"{name}.") for other in listed)
    }
    assert unlisted == set()


def test_every_listed_symbol_is_used() -> None:
    used = set().union(*map(names_of, SOURCES.values())) | {"load_general_plugins"}
    assert [symbol.path for symbol in SYMBOLS if symbol.path.rpartition(".")[2] not in used] == []


def test_every_engine_method_called_by_name_is_listed() -> None:
    called = set().union(*(called_by_name(text, CALLERS) for text in TOUCH_VLLM.values()))
    listed = {symbol.path.rpartition(".") for symbol in SYMBOLS}
    assert called - {name for owner, _, name in listed if owner.endswith((".EngineCoreProc", ".Worker"))} == set()
    assert "add_lora" in called


def overridden() -> list[str]:
    """Methods of vLLM's client interface that ours implements."""
    return sorted(
        name
        for name, member in vars(FleetClient).items()
        if inspect.isfunction(member) and hasattr(EngineCoreClient, name)
    )


@pytest.mark.parametrize("name", [name for name in overridden() if not name.startswith("_")])
def test_the_fleet_takes_the_parameters_that_vllms_own_client_takes(name: str) -> None:
    def names(function: Callable[..., Any]) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(getattr(FleetClient, name)) == names(getattr(AsyncMPClient, name))
