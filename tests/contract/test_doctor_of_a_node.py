"""`vllm-omni-plugin doctor` with the command line of a node: which model and stage it compares with the head's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.cli import main
from vllm_omni_plugin.coordinator import HeadAnswer, HeadFacts
from vllm_omni_plugin.integration import doctor
from vllm_omni_plugin.integration.checks import machine_checks
from vllm_omni_plugin.integration.processes import headless


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that vLLM was to configure after the head, which has another one, was asked."""
    planned: list[str] = []

    def plan(args: Any, options: Any) -> SimpleNamespace:
        assert asked
        planned.append(args.model)
        return SimpleNamespace(fingerprint={"model": args.model})

    asked: list[int] = []

    def ask(address: str, stage_id: int, secrets: Any) -> HeadAnswer:
        asked.append(stage_id)
        return HeadAnswer(HeadFacts(0.0, [0], {"model": "theirs"}))

    monkeypatch.setattr(headless, "plan_node", plan)
    monkeypatch.setattr(doctor, "ask_head", ask)
    return planned


@pytest.mark.parametrize("given", [("mine",), ("--model", "mine"), ("--config", "FILE")])
def test_a_model_is_compared_however_it_is_named(
    given: tuple[str, ...], planned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: mine\n")
    assert main(["doctor", *(str(file) if word == "FILE" else word for word in given), "--against", "127.0.0.1:9"]) == 1
    assert planned == ["mine"]
    assert "head has theirs, replica mine" in capsys.readouterr().out


def test_without_a_model_the_stage_alone_is_compared(planned: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--against", "127.0.0.1:9"]) == 0
    assert "not known  model: none was named" in capsys.readouterr().out
    assert main(["doctor", "--against", "127.0.0.1:9", "--omni-stage-id", "1"]) == 1
    assert "stage: the head has 0, replica 1" in capsys.readouterr().out
    assert planned == []


def test_a_vllm_that_is_not_supported_but_wanted_is_a_warning_and_the_rest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, planned: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_checks, "why_unsupported", lambda version: "too new")
    main(["doctor", "mine", "--omni-any-vllm", "--against", "127.0.0.1:9"])
    assert "warning    vLLM: too new; with --omni-any-vllm" in capsys.readouterr().out
    assert planned == ["mine"]
