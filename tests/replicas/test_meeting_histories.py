"""Machines of a replica through random histories of faults, in simulated time: they always meet again, all of them."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from vllm_omni_plugin.replicas.control.lease_messages import MachineReport, MeetingPlan
from vllm_omni_plugin.replicas.machines.meetings import Meetings
from vllm_omni_plugin.replicas.machines.other_machine import Attendance, Step

TIMEOUT, INTERVAL, TICK = 10.0, 1.0, 0.25
MACHINES = 4
FAULTY_S, CALM_S = 240.0, 90.0
"""Of a history: faults come in the first part; in the second one all must meet."""


@dataclass
class Other:
    """Another machine with what connects it to the first one. `stopped` by SIGSTOP, `cut` from the network."""

    rank: int
    process: int
    pause: float = 0.0
    attendance: Attendance = field(default_factory=Attendance)
    ends_at: float | None = None
    stopped: bool = False
    cut: bool = False
    mended_at: float = 0.0
    started: list[int] = field(default_factory=list)
    ready_at: float = 0.0
    answered_at: float = 0.0
    reported_at: float = 0.0
    to_first: deque[MachineReport] = field(default_factory=deque)
    from_first: deque[MeetingPlan] = field(default_factory=deque)

    def restart(self, now: float) -> None:
        """SIGKILL of its command, whose workers end with it, and a new one."""
        self.__init__(  # type: ignore[misc]
            self.rank,
            self.process + 1,
            self.pause,
            cut=self.cut,
            mended_at=self.mended_at,
            answered_at=now,
            started=self.started,
        )

    def run(self, now: float, chance: random.Random) -> None:
        if now >= self.mended_at:
            self.stopped = self.cut = False
        if self.stopped:
            return
        while self.from_first:
            plan = self.from_first.popleft()
            self.answered_at = now
            assert not plan.refusal, plan
            self._follow(plan.meeting, now, chance)
        if now - self.answered_at > TIMEOUT:
            self.disconnect(now, chance)
        if self.ends_at is not None and now >= self.ends_at:
            self.ends_at = None
            self.attendance.ended()
            self.ready_at = now + self.pause
            self.report(now)
        if now - self.reported_at >= INTERVAL:
            self.report(now)

    def crash(self, now: float, chance: random.Random) -> None:
        """Its workers end by themselves."""
        if self.attendance.running and self.ends_at is None and not self.stopped:
            self.attendance.fail("SIGKILL")
            self.ends_at = now + chance.uniform(0, 3)
            self.report(now)

    def disconnect(self, now: float, chance: random.Random) -> None:
        """Its connection breaks, which the first machine need not notice."""
        self.to_first.clear()
        self.from_first.clear()
        self.answered_at = now
        if self.attendance.running and self.ends_at is None and not self.stopped:
            self.attendance.fail("it has lost the first machine")
            self.ends_at = now + chance.uniform(0, 3)

    def report(self, now: float) -> None:
        self.reported_at = now
        state = self.attendance
        if not self.cut:
            self.to_first.append(
                MachineReport(
                    self.rank,
                    self.process,
                    "",
                    {},
                    state.running,
                    state.failed,
                    state.reason,
                    ready=now >= self.ready_at,
                )
            )

    def _follow(self, meeting: int, now: float, chance: random.Random) -> None:
        step = self.attendance.follow(meeting)
        if step is Step.END and self.ends_at is None:
            self.ends_at = now + chance.uniform(0, 3)
        if step is Step.START:
            # Those of a machine start once in a meeting, also if its command was started again.
            assert meeting not in self.started
            self.started.append(meeting)
            self.report(now)


class History:
    """One first machine and the others. Meetings have the numbers 1, 2, 3, ...

    In a `group`, the first machine reports as the others do, to itself, and the ranks of each pause before they wait.
    """

    def __init__(self, seed: int, group: bool) -> None:
        self.chance = random.Random(seed)
        self.first_rank = 0 if group else 1
        pause = 2.0 if group else 0.0
        self.others = [Other(rank, 1000 * (rank + 1), pause) for rank in range(self.first_rank, MACHINES)]
        self.now = 0.0
        self.met = 0
        self.restart_first()

    def restart_first(self) -> None:
        self.meetings = Meetings(MACHINES, {}, TIMEOUT, first_rank=self.first_rank)
        self.next_start = self.now + 1.0
        for other in self.others:
            other.to_first.clear()
            other.from_first.clear()
        if self.first_rank == 0:
            self.others[0].restart(self.now)

    def fault(self) -> None:
        other = self.chance.choice(self.others)
        match self.chance.randrange(7):
            case 0:
                other.restart(self.now)
            case 1:
                other.crash(self.now, self.chance)
            case 2:
                other.stopped, other.mended_at = True, self.now + self.chance.uniform(1, 25)
            case 3:
                other.cut, other.mended_at = True, self.now + self.chance.uniform(1, 25)
            case 4:
                self.restart_first()
            case 5:
                other.disconnect(self.now, self.chance)
            case 6:
                # The engine of the first machine ends.
                self.end_meeting()

    def end_meeting(self) -> None:
        self.send(self.meetings.end(self.meetings.plan.meeting))
        self.next_start = self.now + 1.0

    def send(self, messages: list[tuple[bytes, MeetingPlan]]) -> None:
        for peer, plan in messages:
            # What is for a former process is lost with its connection.
            for other in self.others:
                if int(peer) == other.process and not other.cut:
                    other.from_first.append(plan)

    def tick(self) -> None:
        self.now += TICK
        for other in self.others:
            other.run(self.now, self.chance)
            while other.to_first:
                report = other.to_first.popleft()
                self.send(self.meetings.report(b"%d" % report.process, report, self.now))
        self.meetings.tick(self.now)
        if self.meetings.plan.meeting and self.meetings.broken:
            self.end_meeting()
        if not self.meetings.plan.meeting and self.now >= self.next_start and not self.meetings.missing(self.now):
            self.met += 1
            self.send(self.meetings.begin(MeetingPlan(self.met)))

    @property
    def all_in_one(self) -> bool:
        running = {other.attendance.running for other in self.others if other.ends_at is None}
        return running == {self.meetings.plan.meeting} != {0} and not self.meetings.broken


@pytest.mark.parametrize("group", [False, True], ids=["one engine", "lockstep group"])
@pytest.mark.parametrize("seed", range(100))
def test_after_any_faults_all_machines_meet_and_stay(seed: int, group: bool) -> None:
    history = History(seed, group)
    while history.now < FAULTY_S:
        if history.chance.random() < 0.02:
            history.fault()
        history.tick()
    while history.now < FAULTY_S + CALM_S:
        history.tick()
    assert history.all_in_one
    met = history.met
    while history.now < FAULTY_S + 2 * CALM_S:
        history.tick()
        assert history.all_in_one
    assert history.met == met
