"""The installed vLLM has every symbol that we use, and each is listed in symbols.txt."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.executor import abstract, uniproc_executor
from vllm.v1.worker.worker_base import WorkerBase

import vllm_omni_plugin
from tests.fakes.sleeping_executor import Worker
from vllm_omni_plugin.coordinator.protocol.call_effects import HEAD_CALLS
from vllm_omni_plugin.integration.core_client import utility_calls
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.core_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.vllm_api.codecs.message_filter import ALLOWED_CALLS
from vllm_omni_plugin.vllm_api.versions import differences as differences_module
from vllm_omni_plugin.vllm_api.versions.differences import Difference
from vllm_omni_plugin.vllm_api.versions.supported import installed_release

from .resolution import Symbol, check, read_symbols
from .usage import called_by_name, names_of, vllm_names

SYMBOLS = list(read_symbols(Path(__file__).with_name("symbols.txt").read_text()))
PACKAGE = Path(vllm_omni_plugin.__file__).parent
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
KNOW_VLLM = {"vllm_api", "integration"}
TOUCH_VLLM = {path: text for path, text in SOURCES.items() if path.relative_to(PACKAGE).parts[0] in KNOW_VLLM}
CALLERS = frozenset({"call_utility_async", "call_utility_all_async", "call_utility_consensus_async"})


NOT_ASKED_FOR = {"execute_dummy_batch", "save_sharded_state"}
"""By AsyncLLM."""

HERE = [symbol for symbol in SYMBOLS if symbol.is_of(installed_release())]


@pytest.mark.parametrize("symbol", HERE, ids=lambda symbol: symbol.path)
def test_each_symbol_is_as_listed(symbol: Symbol) -> None:
    check(symbol)


def test_symbols_of_some_versions_are_those_of_differences_between_supported_ones() -> None:
    differences = {member.since for member in vars(differences_module).values() if isinstance(member, Difference)}
    assert {limit for symbol in SYMBOLS for limit in (symbol.since, symbol.before) if limit} <= differences


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


def test_every_engine_method_that_vllms_client_calls_is_listed_and_may_be_called() -> None:
    called = called_by_name(inspect.getsource(AsyncMPClient), CALLERS) - NOT_ASKED_FOR
    listed = {symbol.path.rpartition(".") for symbol in SYMBOLS}
    assert called - {name for owner, _, name in listed if owner.endswith(".EngineCoreProc")} == set()
    assert called - ALLOWED_CALLS == set()
    assert utility_calls.STAGES_OF_METHOD.keys() | utility_calls.COMBINE_ANSWERS.keys() <= called | HEAD_CALLS


def overridden() -> list[str]:
    return sorted(
        name
        for name, member in {**vars(UtilityCallClient), **vars(FleetClient)}.items()
        if inspect.isfunction(member) and hasattr(EngineCoreClient, name)
    )


@pytest.mark.parametrize("name", [name for name in overridden() if not name.startswith("_")])
def test_the_fleet_takes_the_parameters_that_vllms_own_client_takes(name: str) -> None:
    def names(function: Callable[..., Any]) -> list[str]:
        return list(inspect.signature(function).parameters)

    vllms = names(getattr(AsyncMPClient, name))
    # Those of a later version may follow.
    assert names(getattr(FleetClient, name))[: len(vllms)] == vllms


CALLED = set(
    re.findall(r'collective_rpc\(\s*"(\w+)"', inspect.getsource(abstract) + inspect.getsource(uniproc_executor))
)
OURS = {name: member for name, member in vars(Worker).items() if inspect.isfunction(member)}


def parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(method).parameters.values())[1:]


def test_the_calls_are_found() -> None:
    assert {"set_kv_cache_layout", "determine_available_memory", "execute_model"} <= CALLED


@pytest.mark.parametrize("name", sorted(CALLED & OURS.keys() & vars(WorkerBase).keys()))
def test_our_worker_takes_what_vllms_is_given(name: str) -> None:
    theirs = parameters(getattr(WorkerBase, name))
    inspect.signature(OURS[name]).bind(None, *theirs)
