"""The systemd units, checked by systemd if installed, and against the needs of heads and nodes."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.project.source_tree import ROOT

from .flags import KEEP_ALIVE, faults, flags_of

UNITS = ROOT / "deploy" / "systemd"
HEAD, NODE = "vllm-omni-head.service", "vllm-omni-node@.service"
TIMEOUTS = [(HEAD, "--shutdown-timeout"), (NODE, "--omni-drain-timeout")]
_ANALYZE = shutil.which("systemd-analyze")


def settings(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def environment() -> dict[str, str]:
    lines = (UNITS / "fleet.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def command(unit: str, **more: str) -> list[str]:
    """Expand variables like systemd: `${NAME}` is one word, `$NAME` is split at spaces."""
    (line,) = settings(unit)["ExecStart"]
    given = environment() | more
    words: list[str] = []
    for word in shlex.split(line):
        if re.fullmatch(r"\$\w+", word):
            words += given.get(word[1:], "").split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: given[match[1]], word))
    return words


def verify(unit: Path) -> str:
    assert _ANALYZE is not None
    done = subprocess.run([_ANALYZE, "verify", unit], capture_output=True, text=True, check=False, timeout=60)
    return done.stderr


@pytest.mark.skipif(_ANALYZE is None, reason="there is no systemd-analyze on this machine")
@pytest.mark.parametrize("unit", [HEAD, NODE])
def test_systemd_verifies_the_unit(unit: str, tmp_path: Path) -> None:
    # systemd requires that the program exists.
    text = (UNITS / unit).read_text().replace("/opt/vllm-omni/bin/vllm", "/bin/true")
    (tmp_path / unit).write_text(text)
    assert verify(tmp_path / unit) == ""
    (tmp_path / unit).write_text(text.replace("TimeoutStopSec", "TimeoutStop"))
    assert "TimeoutStop" in verify(tmp_path / unit)


@pytest.mark.parametrize("unit", [HEAD, NODE])
def test_the_plugin_accepts_the_command_line(unit: str) -> None:
    words = command(unit)
    assert words[1:3] == ["serve", environment()["MODEL"]]
    flags = flags_of(words)
    assert flags["--omni-master-address"] == (environment()["MASTER_ADDRESS"] if unit == NODE else "0.0.0.0")
    # The common flags of heads and nodes.
    assert dict(zip(*[iter(environment()["ARGS"].split())] * 2, strict=True)).items() <= flags.items()
    assert ("--headless" in flags) == (unit == NODE)


def test_one_more_head_has_flags_of_its_own() -> None:
    words = command(HEAD, HEAD_ARGS="--omni-join --omni-master-address head.example.com")
    assert faults(words) == []
    assert flags_of(words)["--omni-master-address"] == "head.example.com"


@pytest.mark.parametrize(("unit", "flag"), TIMEOUTS)
def test_a_stop_drains(unit: str, flag: str) -> None:
    said = settings(unit)
    assert said["TimeoutStopSec"] == [str(int(flags_of(command(unit))[flag]) + 30)]
    # Only to the server: engines would otherwise stop, too.
    assert said["KillMode"] == ["mixed"]
    assert "KillSignal" not in said


@pytest.mark.parametrize("unit", [HEAD, NODE])
def test_the_home_is_a_folder_that_systemd_makes(unit: str) -> None:
    said = settings(unit)
    variables = dict(word.split("=", 1) for line in said["Environment"] for word in line.split())
    (folder,) = said["StateDirectory"]
    assert variables["HOME"] == variables["HF_HOME"] == f"%S/{folder}"


def test_a_head_needs_no_gpu() -> None:
    assert ["VLLM_TARGET_DEVICE=cpu" in settings(unit)["Environment"] for unit in (HEAD, NODE)] == [True, False]


def test_idle_connections_to_the_head_last_longer_than_those_of_proxies() -> None:
    assert f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE={KEEP_ALIVE}" in settings(HEAD)["Environment"]


def test_an_instance_is_a_gpu_unless_its_file_overrides_it() -> None:
    said = settings(NODE)
    assert "CUDA_VISIBLE_DEVICES=%i" in said["Environment"]
    assert "-/etc/vllm-omni/node-%i.env" in said["EnvironmentFile"]
    assert (UNITS / "fleet.env").read_text().startswith("# /etc/vllm-omni/fleet.env,")
    assert said["EnvironmentFile"][0] == settings(HEAD)["EnvironmentFile"][0] == "/etc/vllm-omni/fleet.env"
