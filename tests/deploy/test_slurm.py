"""The batch scripts of Slurm: what they run, what a signal does, and a head that comes back elsewhere.

`vllm` is a stand-in that takes down its command line; `tests/engine/test_slurm_fleet.py` has the real one.
"""

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine.server import until

from .flags import KEEP_ALIVE, faults, flags_of
from .slurm import SCRIPTS, Slurm, has_ended

_VLLM = """\
#!/usr/bin/env bash
trap 'echo "ended $*" >>"$CALLS"; exit 0' TERM
echo "$$ $*" >>"$CALLS"
echo "${VLLM_HTTP_TIMEOUT_KEEP_ALIVE-} ${VLLM_TARGET_DEVICE-}" >"$CALLS.environment"
until [[ -s $CALLS.fail$SLURM_NODEID ]]; do sleep 0.05; done
exit "$(<"$CALLS.fail$SLURM_NODEID")"
"""
_SRUN = """\
#!/usr/bin/env bash
signal_all() {
    for task in "${tasks[@]}"; do
        children=()
        read -ra children <"/proc/$task/task/$task/children"
        kill "$1" "$task" "${children[@]}"
    done 2>/dev/null
}
trap 'signal_all -TERM' TERM
highest=0 ended=
while [[ $1 == --* ]]; do
    [[ $1 != --nodes=* ]] || machines=${1#*=}
    [[ $1 != --kill-on-bad-exit=1 ]] || kills=yes
    shift
done
for ((rank = 0; rank < machines; rank++)); do
    SLURM_NODEID=$rank "$@" &
    tasks+=($!)
done
status=0
until [[ -n $ended ]]; do
    status=0
    wait -n -p ended || status=$?
done
[[ $status == 0 || -z $kills ]] || signal_all -KILL
for task in "${tasks[@]}"; do
    status=0
    wait "$task" || status=$?
    while kill -0 "$task" 2>/dev/null; do
        status=0
        wait "$task" || status=$?
    done
    ((status <= highest)) || highest=$status
done
exit "$highest"
"""
"""As `srun`, ends with the highest exit code of its tasks, and signals all processes of each."""
_SLEEP = f"#!/bin/sh\nexec {shutil.which('sleep')} 0.05\n"
"""Longer than the scripts' interval of two seconds."""


class Fleet:
    """The scripts in their own folder, and the command lines that they ran."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.folder = folder / "fleet"
        self.folder.mkdir()
        self.slurm = slurm
        self._calls = folder / "calls"

    def sbatch(self, script: str, *options: str) -> str:
        return " ".join(["sbatch", *options, f"examples/slurm/{script}", str(self.folder), "MODEL", "--seed 3"])

    def lines(self, word: str) -> list[list[str]]:
        text = self._calls.read_text() if self._calls.exists() else ""
        return [line.split() for line in text.splitlines() if word in line.split()]

    def started(self, count: int = 1) -> list[list[str]]:
        """Wait for `count` command lines, and return them without process ids."""
        until(lambda: len(self.lines("serve")) - len(self.lines("ended")) == count, f"{count} run")
        ended = [line[1:] for line in self.lines("ended")]
        return [line[1:] for line in self.lines("serve") if line[0] != "ended" and line[1:] not in ended]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    (tmp_path / "bin").mkdir()
    for name, script in (("vllm", _VLLM), ("sleep", _SLEEP), ("srun", _SRUN)):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    with Slurm(
        tmp_path, CALLS=str(tmp_path / "calls"), OMNI_HEAD_ADDRESS="head-1", OMNI_MASTER_ADDR="first-machine"
    ) as slurm:
        yield Fleet(slurm, tmp_path)


def test_nodes_of_an_array_wait_for_the_head_and_join_it(fleet: Fleet) -> None:
    nodes = fleet.slurm.submit(fleet.sbatch("nodes.sbatch", "--array=0-1"))
    assert len(nodes) == 2
    fleet.slurm.submit(fleet.sbatch("head.sbatch"))
    head, *joined = sorted(fleet.started(3), key=lambda line: "--headless" in line)
    assert (fleet.folder / "head").read_text() == "head-1 7500\n"
    for command in (head, *joined):
        flags = flags_of(command)
        assert command[:2] == ["serve", "MODEL"]
        assert faults(command) == []
        address = "head-1" if "--headless" in command else "0.0.0.0"
        assert (flags["--omni-master-address"], flags["--omni-master-port"]) == (address, "7500")
        assert (flags["--omni-secret-file"], flags["--seed"]) == (str(fleet.folder / "fleet.secret"), "3")
    assert ["--headless" in command for command in (head, *joined)] == [False, True, True]


def test_a_head_needs_no_gpu_and_its_idle_connections_last_longer_than_those_of_proxies(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.slurm.submit(fleet.sbatch("head.sbatch"))
    environment = tmp_path / "calls.environment"
    until(lambda: environment.exists() and environment.read_text(), "it runs")
    assert environment.read_text() == f"{KEEP_ALIVE} cpu\n"


@pytest.mark.parametrize(
    ("script", "flag"), [("head.sbatch", "--shutdown-timeout"), ("nodes.sbatch", "--omni-drain-timeout")]
)
def test_slurm_signals_early_enough_for_requests_in_flight(fleet: Fleet, script: str, flag: str) -> None:
    text = (SCRIPTS / script).read_text()
    (seconds,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", text, flags=re.MULTILINE)
    (fleet.folder / "head").write_text("head-1 7500\n")
    fleet.slurm.submit(fleet.sbatch(script, *(["--array=0"] if script == "nodes.sbatch" else [])))
    (command,) = fleet.started()
    assert int(seconds) == int(flags_of(command)[flag]) + 30


@pytest.mark.parametrize("script", ["head.sbatch", "nodes.sbatch"])
def test_the_job_ends_with_the_signalled_server(fleet: Fleet, script: str) -> None:
    (fleet.folder / "head").write_text("head-1 7500\n")
    (job,) = fleet.slurm.submit(fleet.sbatch(script, "--array=0"))
    (command,) = fleet.started()
    # Only to the batch shell, like `--signal=B:TERM` and `scancel --batch`.
    job.send_signal(signal.SIGTERM)
    until(lambda: has_ended(job), "the job ends")
    assert fleet.lines("ended") == [["ended", *command]]


def test_a_node_that_waits_for_a_head_ends_on_a_signal(fleet: Fleet) -> None:
    (job,) = fleet.slurm.submit(fleet.sbatch("nodes.sbatch", "--array=0"))
    until(lambda: job.children(), "it waits")
    job.send_signal(signal.SIGTERM)
    until(lambda: has_ended(job), "the job ends")
    assert fleet.lines("serve") == []


def test_nodes_follow_a_head_that_was_requeued_to_another_machine(fleet: Fleet) -> None:
    fleet.slurm.submit(fleet.sbatch("head.sbatch"))
    (node,) = fleet.slurm.submit(fleet.sbatch("nodes.sbatch", "--array=0"))
    fleet.started(2)
    fleet.slurm.submit(f"OMNI_HEAD_ADDRESS=head-2 OMNI_MASTER_PORT=7600 {fleet.sbatch('head.sbatch')}")
    until(lambda: len([line for line in fleet.lines("--headless") if line[0] != "ended"]) == 2, "it joins the new head")
    (left,) = fleet.lines("ended")
    assert flags_of(left)["--omni-master-address"] == "head-1"
    flags = flags_of(fleet.lines("--headless")[-1])
    assert (flags["--omni-master-address"], flags["--omni-master-port"]) == ("head-2", "7600")
    assert not has_ended(node)


def test_a_head_that_joins_leaves_the_nodes_where_they_are(fleet: Fleet) -> None:
    # As for an upgrade, when nodes of both generations are at the first head's coordinator.
    fleet.slurm.submit(f"OMNI_MASTER_PORT=7600 {fleet.sbatch('head.sbatch')}")
    fleet.started(1)
    fleet.slurm.submit(f"OMNI_HEAD_ADDRESS=head-2 {fleet.sbatch('head.sbatch')} --omni-join")
    (joined,) = (line for line in fleet.started(2) if "--omni-join" in line)
    flags = flags_of(joined)
    assert (flags["--omni-master-address"], flags["--omni-master-port"]) == ("head-1", "7600")
    assert faults(joined) == []
    assert (fleet.folder / "head").read_text() == "head-1 7600\n"


def test_a_shared_folder_that_cannot_be_read_for_a_while_costs_no_node(fleet: Fleet) -> None:
    address = fleet.folder / "head"
    address.write_text("head-1 7500\n")
    (job,) = fleet.slurm.submit(fleet.sbatch("nodes.sbatch", "--array=0"))
    fleet.started()
    (log,) = fleet.slurm.logs.glob("*.log")
    address.rename(fleet.folder / "elsewhere")
    until(lambda: str(address) in log.read_text(), "a read fails")
    (fleet.folder / "elsewhere").rename(address)
    assert not has_ended(job)
    assert len(fleet.started()) == 1
    address.write_text("head-2 7500\n")
    until(lambda: len(fleet.lines("--headless")) == 3, "it joins the new head")
    (left,) = fleet.lines("ended")
    assert flags_of(left)["--omni-master-address"] == "head-1"


@pytest.mark.parametrize("code", [1, 2])
def test_a_node_that_fails_for_good_ends_its_job(fleet: Fleet, tmp_path: Path, code: int) -> None:
    (fleet.folder / "head").write_text("head-1 7500\n")
    (job,) = fleet.slurm.submit(fleet.sbatch("nodes.sbatch", "--array=0"))
    fleet.started()
    (tmp_path / "calls.fail").write_text(str(code))
    until(lambda: has_ended(job), "the job ends")
    assert len(fleet.lines("serve")) == 1


@pytest.mark.parametrize("code", [75, 137])
def test_a_refused_or_killed_node_is_restarted(fleet: Fleet, tmp_path: Path, code: int) -> None:
    (fleet.folder / "head").write_text("head-1 7500\n")
    (job,) = fleet.slurm.submit(fleet.sbatch("nodes.sbatch", "--array=0"))
    fleet.started()
    (tmp_path / "calls.fail").write_text(str(code))
    # It fails again and again, so more than one start may be seen at once.
    until(lambda: len(fleet.lines("serve")) >= 2, "it is restarted")
    assert not has_ended(job)


def test_a_machine_that_fails_for_good_ends_the_job_though_the_other_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    (fleet.folder / "head").write_text("head-1 7500\n")
    (job,) = fleet.slurm.submit(fleet.sbatch("nodes.sbatch", "--array=0", "--nodes=2"))
    fleet.started(2)
    (tmp_path / "calls.fail1").write_text("1")
    until(lambda: has_ended(job), "the job ends")
    assert len(fleet.lines("serve")) == 2


def test_with_more_machines_each_task_is_one_replica_over_all_of_them(fleet: Fleet) -> None:
    (job,) = fleet.slurm.submit(fleet.sbatch("nodes.sbatch", "--array=4-4", "--nodes=2"))
    fleet.slurm.submit(fleet.sbatch("head.sbatch"))
    commands = [flags_of(command) for command in fleet.started(3) if "--headless" in command]
    assert sorted(flags["--node-rank"] for flags in commands) == ["0", "1"]
    assert {flags["--nnodes"] for flags in commands} == {"2"}
    assert {(flags["--master-addr"], flags["--master-port"]) for flags in commands} == {("first-machine", "29505")}
    assert {(flags["--seed"], flags["--omni-master-address"]) for flags in commands} == {("3", "head-1")}
    job.send_signal(signal.SIGTERM)
    until(lambda: has_ended(job), "the job ends with all of its machines")
    assert len([line for line in fleet.lines("ended") if "--nnodes" in line]) == 2


def test_a_killed_machine_ends_its_replica_whose_machines_all_start_again(fleet: Fleet) -> None:
    (fleet.folder / "head").write_text("head-1 7500\n")
    (job,) = fleet.slurm.submit(fleet.sbatch("nodes.sbatch", "--array=0-0", "--nodes=2"))
    fleet.started(2)
    (killed,) = (line for line in fleet.lines("serve") if line[-1] == "1")
    psutil.Process(int(killed[0])).kill()
    until(lambda: len([line for line in fleet.lines("serve") if line[0] != "ended"]) == 4, "both are started again")
    assert not has_ended(job)
