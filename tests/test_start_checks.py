"""What is looked at before anything starts: certain faults end the command, doubtful ones are told, no others."""

import logging
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.free_ports import free_port
from vllm_omni_plugin.cli import main
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.integration.checks import machine_checks
from vllm_omni_plugin.integration.checks.check_result import CheckResult, Level
from vllm_omni_plugin.integration.checks.machine_checks import (
    check_conflicts,
    check_machine,
    check_plugin,
    check_processor,
    check_version,
)
from vllm_omni_plugin.integration.checks.start_checks import check_head_files, check_or_exit, check_start

MIB = 2**20
OURS = {"omni": "vllm_omni_plugin.entrypoints.plugin:register"}


def node(**other: Any) -> OmniConfig:
    return OmniConfig(master_address="127.0.0.1", master_port=7500, **other)


def about(topic: str, *command: Any, headless: bool = False) -> list[CheckResult]:
    """What is found about one topic; the command is as of `check_start`."""
    return [each for each in check_start(*command, headless) if each.text.startswith(topic)]


def levels(results: Any) -> list[Level]:
    return [result.level for result in results]


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the file system of the shared memory says."""
    found = SimpleNamespace(f_bavail=64, f_frsize=MIB)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    return found


def test_a_healthy_start_says_nothing(caplog: pytest.LogCaptureFixture, shared_memory: SimpleNamespace) -> None:
    shared_memory.f_bavail = 1024
    first = free_port()
    check_or_exit(node(replica_ports=f"{first}-{first + 50}"), 1, 2, headless=True)
    check_or_exit(OmniConfig(), 2, 0, headless=False)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("workers", "free", "is_enough"),
    [(0, 1, True), (1, 240, True), (2, 239, False), (4, 255, False), (8, 512, True)],
)
def test_shared_memory_that_is_too_small_for_the_workers_of_all_replicas_is_a_warning(
    workers: int,
    free: int,
    is_enough: bool,
    shared_memory: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared_memory.f_bavail = free
    check_or_exit(OmniConfig(), 8, workers, headless=False)
    assert [record.levelno for record in caplog.records] == ([] if is_enough else [logging.WARNING])
    assert is_enough or "--shm-size" in caplog.text


@pytest.mark.parametrize(("headless", "limit", "needed"), [(True, 300, 364), (False, 95, 96)], ids=["node", "head"])
def test_a_limit_of_open_files_that_is_too_low_ends_the_command(
    headless: bool, limit: int, needed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    options = node() if headless else OmniConfig()
    check_or_exit(options, 1, 0, headless)
    with pytest.raises(SystemExit) as end:
        check_or_exit(options, 2, 0, headless)
    assert end.value.code == 2
    assert f"vllm serve: error: 2 replicas need some {needed} open files" in capsys.readouterr().err


def test_a_range_without_enough_free_ports_ends_the_command_and_leaves_them_free(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit):
            check_or_exit(node(replica_ports=f"{port}-{port}"), 1, 0, headless=True)
    error = capsys.readouterr().err
    assert f"argument --omni-replica-ports: of {port}-{port} 0 are free on 127.0.0.1, and 3 are needed" in error
    assert "name a range of free ports" in error
    first = free_port()
    for _ in range(2):
        assert Level.ERROR not in levels(check_start(node(replica_ports=f"{first}-{first + 20}"), 1, 0, headless=True))


@pytest.mark.parametrize(
    ("limits", "replicas", "level", "said"),
    [
        ((1024, 65535), 2, Level.OK, "those of a head and of its clients"),
        ((1024, resource.RLIM_INFINITY), 2, Level.OK, ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 2, Level.OK, ""),
        ((1120, 1120), 2, Level.OK, ""),
        ((1119, 65534), 2, Level.WARNING, "leaves a head 1023 for connections of its clients"),
        ((96, 96), 2, Level.WARNING, "leaves a head 0"),
        ((95, 95), 2, Level.ERROR, "2 replicas need some 96 open files, and this process may have 95"),
    ],
)
def test_a_head_alone_needs_open_files_for_its_clients_too(
    limits: tuple[int, int], replicas: int, level: Level, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    result = check_head_files(replicas)
    assert result.level is level
    assert said in result.text


@pytest.fixture
def socket_base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Makes a folder of so many characters in which sockets shall lie."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:

        def make(length: int) -> Path:
            base = Path(folder, "x" * (length - len(folder) - 1))
            base.mkdir()
            monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(base))
            return base

        yield make


@pytest.mark.parametrize(
    ("length", "level", "said"),
    [
        (46, Level.OK, "can be used"),
        (47, Level.WARNING, "has more than 46 characters, so sockets of killed processes are not removed"),
        (64, Level.WARNING, "TMPDIR or VLLM_RPC_BASE_PATH"),
        (65, Level.ERROR, "has 65 characters, and the limit is 64: name a shorter path with TMPDIR"),
    ],
)
def test_the_path_of_sockets_is_told_when_it_is_too_long(
    length: int, level: Level, said: str, socket_base: Callable[[int], Path]
) -> None:
    base = socket_base(length)
    (result,) = about("sockets", OmniConfig(), 1, 0)
    assert result.level is level
    assert said in result.text
    assert list(base.iterdir()) == []


def test_a_folder_of_sockets_that_cannot_be_used_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path / "gone"))
    for replicas, rust_front_end in ((1, False), (0, True)):
        with pytest.raises(SystemExit):
            check_or_exit(OmniConfig(), replicas, 0, headless=False, rust_front_end=rust_front_end)
        error = capsys.readouterr().err
        assert "No such file or directory" in error
        assert "name a writable folder with TMPDIR or VLLM_RPC_BASE_PATH" in error
    # A head that has joined a fleet has no engines, and so no such sockets with vLLM's Python front end.
    check_or_exit(OmniConfig(), 0, 0, headless=False)


@pytest.mark.parametrize(
    ("installed", "allowed", "level", "said"),
    [
        (OURS, None, Level.OK, "vLLM loads it"),
        ({**OURS, "other": "x:y"}, "other,omni", Level.OK, "others in this environment: other"),
        ({}, None, Level.ERROR, "install vllm-omni-plugin into the environment of"),
        ({"omni": "another.package:register"}, None, Level.ERROR, "vLLM does not find it"),
        (OURS, "other", Level.ERROR, "VLLM_PLUGINS is 'other' and does not have it: add omni"),
        (OURS, "", Level.ERROR, "add omni"),
    ],
)
def test_a_plugin_that_vllm_does_not_load_is_an_error(
    installed: dict[str, str], allowed: str | None, level: Level, said: str
) -> None:
    result = check_plugin(installed, allowed)
    assert result.level is level
    assert said in result.text


@pytest.mark.parametrize("name", ["vllm-omni", "vllm_omni", "vLLM-Omni"])
def test_a_package_that_clashes_is_named_with_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(check_conflicts()) == []
    folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (result,) = check_conflicts()
    assert result.level is Level.WARNING
    assert "vllm-omni is installed" in result.text
    assert "do not use --omni" in result.text


@pytest.mark.parametrize(
    ("machine", "features", "version", "trouble", "level"),
    [
        ("x86_64", {"avx2", "avx512f"}, "0.32.0+cpu", "", Level.OK),
        ("x86_64", {"sse2"}, "0.32.0+cpu", "", Level.ERROR),
        ("x86_64", {"sse2"}, "0.32.0+cu129", "", Level.OK),
        ("x86_64", {"avx2", "amx_tile"}, "0.32.0+cpu", "refused. Use --dtype float32.", Level.WARNING),
        ("aarch64", set(), "0.32.0+cpu", "", Level.OK),
    ],
)
def test_a_processor_that_the_build_for_cpus_cannot_use_is_told(
    machine: str, features: set[str], version: str, trouble: str, level: Level
) -> None:
    assert check_processor(machine, features, version, trouble).level is level


@pytest.mark.parametrize(("version", "level"), [("0.32.1", Level.OK), ("0.31.0", Level.ERROR), ("", Level.ERROR)])
def test_a_vllm_that_is_not_supported_is_an_error(version: str, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "installed_version", lambda: version)
    assert check_version(False).level is level
    assert check_version(True).level is (Level.OK if level is Level.OK else Level.WARNING)


def test_nothing_is_wrong_with_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert Level.ERROR not in levels(check_machine())


STAGE = "stages:\n- {id: 0, name: writer, engine: vllm, model: m, output: text, final: true"
BROKEN = "raise RuntimeError('no such machine')"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pipeline.yaml"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        pytest.param("policy: pefix", "stages[0].policy: unknown load balancing policy 'pefix'", id="policy"),
        pytest.param("policy_config: {x: 1}", "stages[0].policy_config: load balancing policy", id="policy's option"),
        pytest.param("transform: 'json:dumps'", "stages[0].transform: ", id="transform with other parameters"),
        pytest.param("transform: 'broken_module:f'", "no such machine", id="module that raises"),
    ],
)
def test_a_name_that_cannot_be_used_is_told_with_its_line(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keys: str, message: str
) -> None:
    monkeypatch.syspath_prepend(file.parent)
    (file.parent / "broken_module.py").write_text(BROKEN)
    file.write_text(f"{STAGE}, {keys}}}\n")
    assert main(["pipeline", "check", str(file)]) == 1
    told = capsys.readouterr().err
    assert f"{file}:2: " in told
    assert message in told


def test_what_a_drawing_names_need_not_be_installed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f"{STAGE}, policy: of.another:Machine}}\n")
    assert main(["pipeline", "check", str(file), "--mermaid"]) == 0
    assert "writer" in capsys.readouterr().out


def test_looking_up_imports_neither_vllm_nor_torch() -> None:
    module = "vllm_omni_plugin.integration.fleet_setup.stage_checks"
    script = f"import sys, {module}; print(sorted({{'vllm', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
