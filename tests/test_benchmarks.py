"""A benchmark runs as its docstring says."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_a_benchmark_prints_a_row_for_each_policy() -> None:
    command = [sys.executable, str(BENCHMARKS / "decision.py"), "--picks", "2", "--replicas", "2"]
    done = subprocess.run(
        [*command, "--policies", "random", "prefix"], capture_output=True, text=True, timeout=120, check=True
    )
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    assert rows == ["policy", "---", "random", "prefix"]
