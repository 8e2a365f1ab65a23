"""`vllm-omni-plugin doctor`: one line for each result, and an exit status that scripts can go by."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.free_ports import free_port
from tests.fakes.secret_files import write_secret
from vllm_omni_plugin.cli import main
from vllm_omni_plugin.integration import doctor
from vllm_omni_plugin.integration.checks.check_result import CheckResult, Level


@pytest.mark.parametrize(("level", "status"), [(Level.OK, 0), (Level.UNKNOWN, 0), (Level.WARNING, 0), (Level.ERROR, 1)])
def test_each_finding_is_a_line_and_only_an_error_ends_with_1(
    level: Level, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "check_version", lambda _: CheckResult(Level.OK, "vLLM: 0.32.0"))
    monkeypatch.setattr(doctor, "check_machine", lambda: [CheckResult(level, "disk: full\n  of  logs")])
    assert main(["doctor"]) == status
    version, disk, *more = capsys.readouterr().out.splitlines()
    assert version == "ok         vLLM: 0.32.0"
    assert disk.split(maxsplit=2 if level is Level.UNKNOWN else 1)[-1] == "disk: full of logs"
    assert [line.removeprefix("ok").split(":")[0].strip() for line in more] == [
        "open files",
        "open files",
        "sockets",
        "shared memory",
    ]


def test_nothing_of_a_vllm_that_is_not_supported_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "check_version", lambda _: CheckResult(Level.ERROR, "vLLM: too old"))
    assert main(["doctor", "MODEL", "--no-such-flag"]) == 1
    assert "error      vLLM: too old" in capsys.readouterr().out


def test_without_a_command_line_shared_memory_must_suffice_for_two_workers(
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


WITHOUT_VLLM = """
import sys
sys.modules.update(vllm=None, torch=None, transformers=None)
from vllm_omni_plugin.cli import main
sys.exit(main(sys.argv[1:]))
"""
HEAD = """
import sys
from vllm_omni_plugin.coordinator import OmniCoordinatorRuntime
runtime = OmniCoordinatorRuntime(secret_file=sys.argv[1], fingerprints={0: {"model": "a"}})
print(runtime.router_address.removeprefix("tcp://"), flush=True)
sys.stdin.read()
runtime.close()
"""


@contextmanager
def head(secret_file: str) -> Iterator[str]:
    """What nodes find of a head with this secret, in a process of its own; where it listens."""
    command = [sys.executable, "-c", HEAD, secret_file]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()


def run_without_vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`doctor` in a process that can import nothing of vLLM's."""
    command = [sys.executable, "-c", WITHOUT_VLLM, "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_head_is_looked_at_without_vllm(tmp_path: Path) -> None:
    secret = write_secret(tmp_path / "right", "the secret of the fleet")
    first = free_port()
    ports = f"{first}-{first + 20}"
    with head(secret) as against:
        done = run_without_vllm(
            "--against", against, "--omni-secret-file", secret, "--omni-replica-ports", ports, "--omni-dp-size-local=2"
        )
    assert done.returncode == 0, done.stderr
    assert "ok         head: it answers" in done.stdout
    assert "ok         open files: the limit allows the 364" in done.stdout
    assert f"ok         ports: enough of {ports} are free" in done.stdout
    assert "not known  model: none was named" in done.stdout


@pytest.mark.parametrize("more", [(), ("MODEL", "--max-model-len", "512")], ids=["a head", "a node's command line"])
def test_a_wrong_secret_is_told_before_vllm_is_imported(more: Sequence[str], tmp_path: Path) -> None:
    right, wrong = (write_secret(tmp_path / name, f"the {name} secret of the fleet") for name in ("right", "wrong"))
    with head(right) as against:
        done = run_without_vllm(*more, "--against", against, "--omni-secret-file", wrong)
    assert done.returncode == 1
    assert "error      secret: cannot join the coordinator" in done.stdout
    # The model needs it.
    assert ("import of vllm halted" in done.stderr) is bool(more)
