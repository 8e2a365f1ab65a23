"""`vllm-omni-plugin doctor`: one line for each finding, and an exit status that scripts can go by.

Against a real head it is shown in `tests/engine/test_nodes_joining.py`.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.cli import main
from vllm_omni_plugin.coordinator import Facts, HeadAnswer
from vllm_omni_plugin.integration import doctor
from vllm_omni_plugin.integration.checks.finding import Finding, Level


@pytest.mark.parametrize(("level", "status"), [(Level.OK, 0), (Level.UNKNOWN, 0), (Level.WARNING, 0), (Level.ERROR, 1)])
def test_each_finding_is_a_line_and_only_an_error_ends_with_1(
    level: Level, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "version_finding", lambda: Finding(Level.OK, "vLLM: 0.32.0"))
    monkeypatch.setattr(doctor, "machine_findings", lambda: [Finding(level, "disk: full\n  of  logs")])
    assert main(["doctor"]) == status
    version, disk, *more = capsys.readouterr().out.splitlines()
    assert version == "ok         vLLM: 0.32.0"
    assert disk.split(maxsplit=2 if level is Level.UNKNOWN else 1)[-1] == "disk: full of logs"
    assert [line.split(":")[0] for line in more] == ["ok         open files", "ok         shared memory"]


def test_nothing_of_a_vllm_that_is_not_supported_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "version_finding", lambda: Finding(Level.ERROR, "vLLM: too old"))
    assert main(["doctor", "MODEL", "--no-such-flag"]) == 1
    assert "error      vLLM: too old" in capsys.readouterr().out


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that vLLM was to configure after the head, which has another one, was asked."""
    from vllm_omni_plugin.integration.processes import headless

    planned: list[str] = []

    def plan(args: Any, options: Any) -> SimpleNamespace:
        assert asked
        planned.append(args.model)
        return SimpleNamespace(fingerprint={"model": args.model})

    asked: list[int] = []

    def ask(address: str, stage_id: int, secrets: Any) -> HeadAnswer:
        asked.append(stage_id)
        return HeadAnswer(Facts(0.0, [0], {"model": "theirs"}))

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


@pytest.mark.parametrize("head", ["10.0.0.1", ":7500", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:70000", "http://h:x"])
def test_a_head_is_named_by_host_and_port(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--against", head])
    assert end.value.code == 2
    assert f"expected HOST:PORT, the head's master address and port, got {head!r}" in capsys.readouterr().err


def test_the_help_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "--against HOST:PORT" in capsys.readouterr().out
