"""A Slurm cluster of one machine with a fake `sbatch`."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from tests.project.source_tree import ROOT

SCRIPTS = ROOT / "examples" / "slurm"
_SBATCH = Path(__file__).with_name("sbatch.py")


class Slurm:
    """Submits jobs and signals them. A context manager; leaving it ends all of them.

    Args:
        folder: for logs, and for `bin`, the first folder of the jobs' PATH.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        programs = folder / "bin"
        programs.mkdir(exist_ok=True)
        (programs / "sbatch").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{_SBATCH}" "$@"\n')
        (programs / "sbatch").chmod(0o755)
        self.logs = folder
        self._jobs = folder / "jobs"
        path = f"{programs}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "JOBS": str(self._jobs), **environment}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def submit(self, command: str) -> list[psutil.Process]:
        """Run a command line; returns the batch shells that it started."""
        before = len(self._pids())
        subprocess.run(["sh", "-ec", command], cwd=ROOT, env=self._environment, check=True, timeout=30)
        return [psutil.Process(pid) for pid in self._pids()[before:]]

    def _pids(self) -> Sequence[int]:
        return [int(line) for line in self._jobs.read_text().split()] if self._jobs.exists() else []


def has_ended(job: psutil.Process) -> bool:
    return not job.is_running() or job.status() == psutil.STATUS_ZOMBIE
