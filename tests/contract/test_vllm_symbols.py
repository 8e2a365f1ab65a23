"""The installed vLLM has every symbol that we use, each is in symbols.txt, and an unsupported vLLM is refused."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.executor import abstract, uniproc_executor
from vllm.v1.worker.worker_base import WorkerBase

import vllm_omni_plugin
from tests.fakes.sleeping_executor import Worker
from vllm_omni_plugin.coordinator.protocol.call_effects import HEAD_CALLS
from vllm_omni_plugin.integration import flags
from vllm_omni_plugin.integration.core_client import utility_calls
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.core_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.integration.processes import serve_command
from vllm_omni_plugin.vllm_api.codecs.message_filter import ALLOWED_CALLS
from vllm_omni_plugin.vllm_api.versions import differences as differences_module
from vllm_omni_plugin.vllm_api.versions import supported
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


REFUSAL = (
    "vllm serve: error: --omni-* flags: this version of vllm-omni-plugin needs vLLM 0.32 or 0.33, and this is 0.31.0\n"
)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parses the command line of `vllm serve` with vLLM 0.31."""
    monkeypatch.setattr(supported, "installed_version", lambda: "0.31.0")
    monkeypatch.setattr(serve_command, "patch_serve_command", lambda: None)
    parser = FlexibleArgumentParser(prog="vllm")
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    for argument in ("model_tag", "--port", "--config"):
        serve.add_argument(argument)
    flags.add_group(serve)

    def parse_words(*words: str) -> Any:
        monkeypatch.setattr("sys.argv", ["vllm", "serve", "m", *words])
        return parser.parse_args()

    return parse_words


@pytest.mark.parametrize("words", [("--omni-join",), ("--port", "1", "-oma", "h"), ("--omni_dp_size_local", "2")])
def test_the_first_of_our_flags_ends_the_command_with_one_line(
    parse: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == REFUSAL


def test_without_our_flags_nothing_is_logged(parse: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--port", "1").port == "1"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (("--omni-any-vllm", "--omni-join"), ""),
        (("--omni-join", "--omni_any_vllm"), ""),
        (("--omni-join",), "omni-any-vllm: true\n"),
        ((), "omni-join: true\nomni-any-vllm: true\n"),
    ],
)
def test_omni_any_vllm_warns_once(
    parse: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, words: tuple[str, ...], file: str
) -> None:
    (config := tmp_path / "config.yaml").write_text(file)
    args = parse(*words, *(("--config", str(config)) if file else ()))
    assert args.omni_join
    assert args.omni_any_vllm
    assert [record.message for record in caplog.records if "Anything may go wrong" in record.message] == [
        "--omni-any-vllm: this version of vllm-omni-plugin needs vLLM 0.32 or 0.33, and this is 0.31.0. "
        "Anything may go wrong."
    ]
