"""`make monitoring` with a fake Prometheus, and the configuration as Prometheus's own tool sees it."""

import shutil
import subprocess

import pytest

from .queries import FOLDER


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's prometheus")
@pytest.mark.parametrize("command", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_accepts_the_rules(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
