"""What AsyncLLM gets when it asks for its engine client."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration import async_llm, command_line
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.options.additional_config import store_options


@pytest.fixture
def make_client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's factory of clients as we change it, which the test undoes."""
    monkeypatch.setattr(EngineCoreClient, "make_async_mp_client", staticmethod(lambda *args, **kwargs: "vLLM's own"))
    for name in ("__init__", "check_health", "shutdown"):
        monkeypatch.setattr(AsyncLLM, name, getattr(AsyncLLM, name))
    monkeypatch.setattr(async_llm, "patch_app", lambda: None)
    async_llm.patch_async_llm()
    return EngineCoreClient.make_async_mp_client


def config(options: OmniConfig | None) -> Any:
    """What of a configuration is looked at."""
    carried = SimpleNamespace(additional_config={})
    if options is not None:
        store_options(carried, options)
    return carried


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(async_llm, "make_fleet_client", fail)


def test_without_our_options_it_is_vllms_own(make_client: Any) -> None:
    assert make_client(config(None), object, True) == "vLLM's own"


def test_an_error_of_the_command_line_found_late_ends_the_server_with_one_line(
    make_client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, ConfigError("pipeline.yaml: stage 'talker': its model generates"))
    with pytest.raises(SystemExit) as ended:
        make_client(config(OmniConfig()), object, True)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "vllm serve: error: pipeline.yaml: stage 'talker': its model generates\n"


@pytest.mark.parametrize("options", [None, OmniConfig()], ids=["no flag", "a flag"])
def test_options_that_a_user_wrote_into_additional_config_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: OmniConfig | None
) -> None:
    class EngineArgs:
        @classmethod
        def from_cli_args(cls, args: Any) -> Any:
            return SimpleNamespace(additional_config={"vllm_omni_plugin": {"dp_size_local": 2}})

    monkeypatch.setattr(command_line, "parse_options", lambda args: options)
    command_line.patch_engine_args(EngineArgs)
    with pytest.raises(SystemExit) as ended:
        EngineArgs.from_cli_args(Namespace())
    assert ended.value.code == 2
    message = "argument --additional-config: 'vllm_omni_plugin' is not for users: give the --omni-* flags instead"
    assert capsys.readouterr().err == f"vllm serve: error: {message}\n"


class FakeFleetClient(FleetClient):
    """Notes how it is shut down."""

    can_finish_requests = True

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def shutdown(self, timeout: float | None = None) -> None:
        self._events.append(f"fleet after {timeout} s")


def test_the_renderer_stays_open_while_the_fleet_finishes_requests(make_client: Any) -> None:
    events: list[str] = []
    server: Any = object.__new__(AsyncLLM)
    server.engine_core = FakeFleetClient(events)
    server.renderer = SimpleNamespace(shutdown=lambda: events.append("renderer"))
    server.shutdown(20.0)
    assert events == ["fleet after 20.0 s"]
    server.engine_core.can_finish_requests = False
    server.shutdown()
    assert events[1:] == ["renderer", "fleet after None s"]
