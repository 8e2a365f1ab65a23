"""`vllm-omni-plugin doctor`: one line for each finding, and an exit status that scripts can go by.

Against a real head it is shown in `tests/engine/test_nodes_joining.py`.
"""

import os
from types import SimpleNamespace

import pytest

from vllm_omni_plugin.cli import main
from vllm_omni_plugin.integration import doctor
from vllm_omni_plugin.integration.checks.finding import Finding, Level


@pytest.mark.parametrize(("level", "status"), [(Level.OK, 0), (Level.UNKNOWN, 0), (Level.WARNING, 0), (Level.ERROR, 1)])
def test_each_finding_is_a_line_and_only_an_error_ends_with_1(
    level: Level, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "version_finding", lambda _: Finding(Level.OK, "vLLM: 0.32.0"))
    monkeypatch.setattr(doctor, "machine_findings", lambda: [Finding(level, "disk: full\n  of  logs")])
    assert main(["doctor"]) == status
    version, disk, *more = capsys.readouterr().out.splitlines()
    assert version == "ok         vLLM: 0.32.0"
    assert disk.split(maxsplit=2 if level is Level.UNKNOWN else 1)[-1] == "disk: full of logs"
    assert [line.split(":")[0] for line in more] == ["ok         open files", "ok         shared memory"]


def test_nothing_of_a_vllm_that_is_not_supported_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "version_finding", lambda _: Finding(Level.ERROR, "vLLM: too old"))
    assert main(["doctor", "MODEL", "--no-such-flag"]) == 1
    assert "error      vLLM: too old" in capsys.readouterr().out


def test_too_little_shared_memory_for_two_workers_is_told_without_a_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=64, f_frsize=2**20))
    main(["doctor"])
    assert "warning    shared memory: /dev/shm has 64 MiB free, and 2 worker processes" in capsys.readouterr().out


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
