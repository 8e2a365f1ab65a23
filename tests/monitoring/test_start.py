"""`make monitoring` with a fake Prometheus, and the configuration as Prometheus's own tool sees it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from .queries import FOLDER

BASH = shutil.which("bash")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The only folder in PATH."""
    for name in ("bash", "cat", "dirname", "mkdir"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    return tmp_path


def start(programs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment |= {"PATH": str(programs)}
    return subprocess.run([str(BASH), FOLDER / "start.sh"], env=environment, capture_output=True, text=True, timeout=60)


def test_without_prometheus_it_says_what_to_install(programs: Path) -> None:
    done = start(programs)
    assert done.returncode == 1
    assert "apt-get install prometheus" in done.stderr


def test_prometheus_gets_the_configuration_and_the_address(programs: Path) -> None:
    (programs / "prometheus").write_text('#!/bin/sh\necho "in $PWD: $*"\n')
    (programs / "prometheus").chmod(0o755)
    done = start(programs, LISTEN="127.0.0.1:1234")
    assert done.returncode == 0, done.stderr
    assert f"in {FOLDER}: --config.file=prometheus.yml" in done.stdout
    assert "--web.listen-address=127.0.0.1:1234" in done.stdout
    # Debian starts its prometheus.service on port 9090.
    assert "--web.listen-address=127.0.0.1:9099" in start(programs).stdout


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's prometheus")
@pytest.mark.parametrize("command", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_accepts_the_rules(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
