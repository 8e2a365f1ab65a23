"""What the first machine of a replica knows of the others, and when all of them may start an engine together."""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from vllm_omni_plugin.replicas.control.lease_messages import (
    MAX_TEXT_CHARS,
    NO_MEETING,
    PROTOCOL_VERSION,
    MachineReport,
    MeetingPlan,
)

Messages = list[tuple[bytes, MeetingPlan]]
"""What to send, by ZMQ peer."""
MAX_REPLACED = 1024
"""Processes that are known to have been replaced, so that one that is started again and again takes no more memory."""
_NOTHING = "nothing"
_LONGEST_INTERVAL_S = 1.0


def report_interval(heartbeat_interval: float) -> float:
    """Seconds between two reports of a machine. They must miss before an engine that has lost one gives up, see
    `vllm_api.launch.fleet_engine`."""
    return min(heartbeat_interval, _LONGEST_INTERVAL_S)


@dataclass(frozen=True)
class _Machine:
    """Another machine: its last report, and when that came in monotonic seconds."""

    peer: bytes
    report: MachineReport
    heard_at: float

    @property
    def name(self) -> str:
        return f"machine {self.report.rank} at {self.report.address}"


def setup_of(fingerprint: Mapping[str, str], layout: Mapping[str, str]) -> dict[str, str]:
    """What must be the same on all machines of a replica, as text."""
    return {**fingerprint, **layout, "protocol": str(PROTOCOL_VERSION)}


class Meetings:
    """The meetings of a replica over so many `machines`. Times are monotonic seconds; nothing here waits or sends.

    A meeting is one start of the engine, on all machines. It can `begin` when nobody is `missing`: every other machine
    has reported within `timeout` seconds, and nothing of an earlier meeting runs there. It is `broken`, for the reason
    in that attribute, when the workers of a machine end, its process is another one, or it is silent for `timeout`
    seconds; the reason stays until the next one. `setup` must be the same on all machines; `tells_setup`: a machine
    that differs may learn it; otherwise only in what it differs, which guesses would find out anyway. The machines that
    report are those from `first_rank` on: with 0, the first one does, too.
    """

    def __init__(
        self,
        machines: int,
        setup: Mapping[str, str],
        timeout: float,
        tells_setup: bool = True,
        *,
        first_rank: int = 1,
    ) -> None:
        self.plan = NO_MEETING
        self.broken = ""
        self._machines = machines
        self._first_rank = first_rank
        self._setup = setup
        self._timeout = timeout
        self._tells_setup = tells_setup
        self._others: dict[int, _Machine] = {}
        # By process, why it is refused.
        self._replaced: dict[int, str] = {}
        # By rank, the processes that take part in the meeting.
        self._members: dict[int, int] = {}

    @property
    def addresses(self) -> list[str]:
        """Those of the machines that have reported, by rank."""
        return [self._others[rank].report.address for rank in sorted(self._others)]

    def report(self, peer: bytes, report: MachineReport, now: float) -> Messages:
        """Take a report; returns the answers. Of two processes with the same rank the later one stays."""
        if refusal := self.refusal(report):
            return [(peer, _refuse(refusal))]
        answers: Messages = []
        former = self._others.get(report.rank)
        if former is not None and former.report.process != report.process:
            refusal = f"{report.address} came later with the same --node-rank {report.rank}"
            self._replaced[former.report.process] = refusal
            if len(self._replaced) > MAX_REPLACED:
                del self._replaced[next(iter(self._replaced))]
            answers = [(former.peer, _refuse(refusal))]
        self._others[report.rank] = _Machine(peer, report, now)
        # Not whether others are silent: if this process stood still, their reports are read next.
        self._look_for_ends()
        if self.broken and self.plan.meeting:
            return [*answers, (peer, NO_MEETING)]
        former_plan, self.plan = self.plan, self._with_leaving()
        return [*answers, *(self._to_all() if self.plan != former_plan else [(peer, self.plan)])]

    def tick(self, now: float) -> None:
        """Look for silent machines, for `MeetingHost.watch`; at least every heartbeat interval."""
        if self.plan.meeting and not self.broken:
            self.broken = self.silent(now, self._timeout)

    def _look_for_ends(self) -> None:
        """A machine that was started again or reports a failure breaks the meeting."""
        if not self.plan.meeting or self.broken:
            return
        for rank, process in self._members.items():
            machine = self._others[rank]
            if machine.report.process != process:
                self.broken = f"{machine.name} was started again"
            elif machine.report.failed == self.plan.meeting:
                self.broken = f"{machine.name}: {machine.report.reason}"

    def silent(self, now: float, seconds: float) -> str:
        """The first machine of the meeting that has been silent for more than this time, in words, or ""."""
        for rank in self._members:
            machine = self._others[rank]
            if now - machine.heard_at > seconds:
                return f"{machine.name} has not answered for {seconds:g} s"
        return ""

    def missing(self, now: float) -> list[str]:
        """The machines that cannot meet now, in words: silent, still ending their workers, or not all ranks wait."""
        missing = []
        for rank in range(self._first_rank, self._machines):
            machine = self._others.get(rank)
            if machine is None or now - machine.heard_at > self._timeout:
                missing.append(f"machine {rank} (--node-rank {rank})")
            elif machine.report.running:
                missing.append(f"{machine.name}, which still ends its workers")
            elif not machine.report.ready:
                missing.append(f"{machine.name}, whose ranks do not start yet")
        return missing

    def begin(self, plan: MeetingPlan) -> Messages:
        """Begin a meeting, if nobody is missing. Its number must be new, also for other first machines of before."""
        self.plan, self.broken = plan, ""
        self._members = {rank: machine.report.process for rank, machine in self._others.items()}
        return self._to_all()

    def end(self, meeting: int) -> Messages:
        """End this meeting if it goes on: all machines end their workers."""
        if meeting != self.plan.meeting:
            return []
        self.plan = MeetingPlan(reason=self.broken[:MAX_TEXT_CHARS])
        self.plan = self._with_leaving()
        return self._to_all()

    def _with_leaving(self) -> MeetingPlan:
        """The plan; once a machine leaves, all drain, and once all have drained, all leave."""
        reports = [self._others[rank].report for rank in (self._members if self.plan.meeting else self._others)]
        leaves = any(report.leaving for report in reports)
        have_drained = all(report.drained == self.plan.meeting for report in reports)
        return replace(self.plan, drain=leaves, leave=leaves and (self.plan.leave or have_drained))

    def _to_all(self) -> Messages:
        return [(machine.peer, self.plan) for machine in self._others.values()]

    def refusal(self, report: MachineReport) -> str:
        """Why the process may not take part: its rank, another one in its place, or another setup; or ""."""
        if not self._first_rank <= report.rank < self._machines:
            return f"--node-rank {report.rank}: the first machine has --nnodes {self._machines}"
        if report.process in self._replaced:
            return self._replaced[report.process]
        differing = [
            name
            for name in sorted(report.setup.keys() | self._setup.keys())
            if report.setup.get(name) != self._setup.get(name)
        ]
        return "; ".join(
            f"{name} is {report.setup.get(name, _NOTHING)}, and on the first machine "
            + (self._setup.get(name, _NOTHING) if self._tells_setup else "another value")
            for name in differing
        )


def _refuse(reason: str) -> MeetingPlan:
    return MeetingPlan(refusal=reason[:MAX_TEXT_CHARS])
