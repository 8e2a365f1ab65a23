"""What is looked at before anything starts: certain faults end the command, doubtful ones are told, no others."""

import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.free_ports import free_port
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import HeadAnswer, HeadFacts
from vllm_omni_plugin.errors import RefusedByHeadError
from vllm_omni_plugin.integration.checks import head_checks, machine_checks
from vllm_omni_plugin.integration.checks.finding import Finding, Level
from vllm_omni_plugin.integration.checks.head_checks import (
    ask_or_refuse,
    head_findings,
    model_findings,
    refuse_other_model,
)
from vllm_omni_plugin.integration.checks.machine_checks import (
    clash_findings,
    machine_findings,
    plugin_finding,
    processor_finding,
    version_finding,
)
from vllm_omni_plugin.integration.checks.start_checks import check_or_exit, start_findings

MIB = 2**20
OURS = {"omni": "vllm_omni_plugin.entrypoints.plugin:register"}
FINGERPRINT = {"model": "a", "dtype": "float32"}
FACTS = HeadFacts(0.0, [0, 2], FINGERPRINT)


def node(**other: Any) -> OmniConfig:
    return OmniConfig(master_address="127.0.0.1", master_port=7500, **other)


def levels(findings: Any) -> list[Level]:
    return [finding.level for finding in findings]


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the file system of the shared memory says."""
    found = SimpleNamespace(f_bavail=64, f_frsize=MIB)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    return found


def test_a_healthy_start_says_nothing(caplog: pytest.LogCaptureFixture, shared_memory: SimpleNamespace) -> None:
    shared_memory.f_bavail = 1024
    first = free_port()
    check_or_exit(node(replica_ports=f"{first}-{min(first + 50, 65535)}"), 1, 2, headless=True)
    check_or_exit(OmniConfig(), 2, 0, headless=False)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("workers", "free", "is_enough"),
    [(0, 1, True), (2, 128, True), (2, 127, False), (4, 255, False), (8, 512, True)],
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


def test_no_shared_memory_at_all_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "statvfs", missing)
    assert levels(start_findings(OmniConfig(), 1, 2, headless=False)) == [Level.UNKNOWN]


def test_a_limit_of_open_files_that_is_too_low_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (300, 300))
    check_or_exit(node(), 1, 0, headless=True)
    with pytest.raises(SystemExit) as end:
        check_or_exit(node(), 2, 0, headless=True)
    assert end.value.code == 2
    assert "vllm serve: error: 2 replicas need some 364 open files" in capsys.readouterr().err


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
    last = min(first + 20, 65535)
    for _ in range(2):
        assert Level.ERROR not in levels(start_findings(node(replica_ports=f"{first}-{last}"), 1, 0, headless=True))


def test_an_address_that_cannot_be_bound_is_not_told_to_be_for_want_of_ports() -> None:
    options = node(replica_ports="20000-20100", replica_address="192.0.2.1")
    *_, ports = start_findings(options, 1, 0, headless=True)
    assert ports.level is Level.ERROR
    assert "--omni-replica-address: 192.0.2.1 cannot be bound" in ports.text
    assert "free ports" not in ports.text


def test_ports_are_not_looked_at_while_the_heads_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    options = OmniConfig(master_address="head.example", master_port=1, replica_ports="1-2")
    assert levels(start_findings(options, 1, 0, headless=True)) == [Level.OK]


def all_findings(answer: HeadAnswer, stage_id: int, fingerprint: dict[str, str] | None) -> Iterator[Finding]:
    yield from head_findings(answer, stage_id)
    if fingerprint is not None:
        yield from model_findings(answer, stage_id, fingerprint)


@pytest.mark.parametrize(
    ("answer", "fingerprint", "expected"),
    [
        pytest.param(HeadAnswer(FACTS), FINGERPRINT, [Level.OK] * 3, id="all alike"),
        pytest.param(HeadAnswer(FACTS), None, [Level.OK] * 2, id="no model to compare"),
        pytest.param(HeadAnswer(trouble="nobody there"), FINGERPRINT, [Level.UNKNOWN], id="head away"),
        pytest.param(HeadAnswer(trouble="no", refused=True), FINGERPRINT, [Level.ERROR], id="secret"),
        pytest.param(HeadAnswer(FACTS, clock_ahead=-5.0), None, [Level.OK] * 2, id="clocks nearly alike"),
        pytest.param(HeadAnswer(FACTS, clock_ahead=-5.1), None, [Level.OK, Level.WARNING], id="clock behind"),
        pytest.param(
            HeadAnswer(HeadFacts(0.0, [], {})), FINGERPRINT, [Level.OK, Level.OK, Level.UNKNOWN], id="tells nothing"
        ),
        pytest.param(
            HeadAnswer(FACTS), {**FINGERPRINT, "dtype": "half"}, [Level.OK, Level.OK, Level.ERROR], id="model"
        ),
    ],
)
def test_only_a_certain_difference_from_the_head_is_an_error(
    answer: HeadAnswer, fingerprint: dict[str, str] | None, expected: list[Level]
) -> None:
    assert levels(all_findings(answer, 0, fingerprint)) == expected


def test_findings_about_the_head_name_what_differs_and_what_to_do() -> None:
    other = {**FINGERPRINT, "dtype": "half"}
    *_, model = all_findings(HeadAnswer(FACTS), 2, other)
    assert "dtype: head has float32, replica half" in model.text
    assert "start head and node with the same model and flags" in model.text


@pytest.mark.parametrize(("stages", "accepted"), [([0], "this secret"), ([], "this node")])
def test_a_head_without_a_secret_accepts_none(stages: list[int], accepted: str) -> None:
    head, _ = head_findings(HeadAnswer(HeadFacts(0.0, stages, {})), 0)
    assert head.text.endswith(accepted)


def test_a_refused_secret_is_told_with_what_to_do() -> None:
    (secret,) = head_findings(HeadAnswer(trouble="refused secret", refused=True), 0)
    assert "give both ends the same --omni-secret-file (sha256sum compares files), or none" in secret.text
    assert "see that the port is the head's master port" in secret.text


@pytest.mark.parametrize("fingerprint", [FINGERPRINT, None])
def test_a_stage_that_the_head_does_not_have_is_an_error_with_or_without_a_model(
    fingerprint: dict[str, str] | None,
) -> None:
    *_, stage = all_findings(HeadAnswer(FACTS), 1, fingerprint)
    assert stage == Finding(
        Level.ERROR, "stage: the head has 0, 2, replica 1: give one of the head's with --omni-stage-id"
    )


def test_the_clocks_difference_is_told_with_what_to_do() -> None:
    *_, clock = head_findings(HeadAnswer(FACTS, clock_ahead=61.4), 0)
    assert "61 s ahead of the head's" in clock.text
    assert "NTP" in clock.text


def compare_and_start() -> None:
    """What a node does about its head before it starts an engine."""
    refuse_other_model(ask_or_refuse("tcp://h:1", 0, None), 0, FINGERPRINT)


@pytest.mark.parametrize(
    ("answer", "warns"),
    [
        (HeadAnswer(FACTS), False),
        (HeadAnswer(trouble="no coordinator answers"), False),
        (HeadAnswer(HeadFacts(0.0, [], {})), False),
        (HeadAnswer(FACTS, clock_ahead=60.0), True),
    ],
)
def test_a_node_goes_on_when_nothing_is_wrong_or_known(
    answer: HeadAnswer, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head_checks, "ask_head", lambda *_: answer)
    compare_and_start()
    assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == ["WARNING"] * warns


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (HeadAnswer(trouble="refused secret", refused=True), "refused secret"),
        (HeadAnswer(HeadFacts(0.0, [0], {"model": "b"})), "model: head has b, replica a"),
        (HeadAnswer(HeadFacts(0.0, [1], {})), "the head has 1, replica 0"),
    ],
)
def test_a_node_that_the_head_would_refuse_ends(answer: HeadAnswer, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_checks, "ask_head", lambda *_: answer)
    with pytest.raises(RefusedByHeadError, match=why):
        compare_and_start()


@pytest.mark.parametrize(
    ("installed", "allowed", "level", "said"),
    [
        (OURS, None, Level.OK, "vLLM loads it"),
        ({**OURS, "other": "x:y"}, "other,omni", Level.OK, "others in this environment: other"),
        ({}, None, Level.ERROR, "install vllm-omni-plugin into the environment of"),
        ({"omni": "another.package:register"}, None, Level.ERROR, "vLLM does not find it"),
        (OURS, "other", Level.ERROR, "VLLM_PLUGINS is 'other' and leaves it out: add omni"),
        (OURS, "", Level.ERROR, "add omni"),
    ],
)
def test_a_plugin_that_vllm_does_not_load_is_an_error(
    installed: dict[str, str], allowed: str | None, level: Level, said: str
) -> None:
    finding = plugin_finding(installed, allowed)
    assert finding.level is level
    assert said in finding.text


@pytest.mark.parametrize("name", ["vllm-omni", "vllm_omni", "vLLM-Omni"])
def test_a_package_that_clashes_is_named_with_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(clash_findings()) == []
    folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = clash_findings()
    assert finding.level is Level.WARNING
    assert "vllm-omni is installed" in finding.text
    assert "leave --omni out" in finding.text


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
    assert processor_finding(machine, features, version, trouble).level is level


@pytest.mark.parametrize(("version", "level"), [("0.32.1", Level.OK), ("0.31.0", Level.ERROR), ("", Level.ERROR)])
def test_a_vllm_that_is_not_supported_is_an_error(version: str, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "installed_version", lambda: version)
    assert version_finding(False).level is level
    assert version_finding(True).level is (Level.OK if level is Level.OK else Level.WARNING)


def test_nothing_is_wrong_with_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert Level.ERROR not in levels(machine_findings())
