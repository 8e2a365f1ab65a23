"""Stands for Slurm's `sbatch`: reads the `#SBATCH` lines and runs the script here, once for each task of its array.

The process id of each task goes into the file that JOBS names.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

_WITH_VALUE = (
    "array job-name nodes ntasks ntasks-per-node "
    "gpus gpus-per-node cpus-per-task mem time output signal open-mode nodelist"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("sbatch", allow_abbrev=False)
    for name in _WITH_VALUE.split():
        parser.add_argument(f"--{name}")
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def main(given: list[str]) -> None:
    parser = _parser()
    script: Path = parser.parse_args(given).script
    lines = [line.split()[1:] for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    options = parser.parse_args([*(word for line in lines for word in line), *given])
    tasks = range(1)
    if options.array:
        first, _, last = options.array.partition("-")
        tasks = range(int(first), int(last or first) + 1)
    job = str(os.getpid())
    for task in tasks:
        slurm = {"SLURM_JOB_ID": f"{job}{task}", "SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": str(task)}
        slurm["SLURM_JOB_NUM_NODES"] = options.nodes or "1"
        output = options.output.replace("%j", job).replace("%A", job).replace("%a", str(task))
        with Path(os.environ["JOBS"]).with_name(output).open("a") as log, open(os.environ["JOBS"], "a") as jobs:
            running = subprocess.Popen(
                [script, *options.arguments],
                env=os.environ | slurm,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            jobs.write(f"{running.pid}\n")
    sys.stdout.write(f"Submitted batch job {job}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
