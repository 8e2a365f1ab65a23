"""When the machines of a replica may start an engine together, and what ends it."""

import pytest
from msgspec.structs import replace

from vllm_omni_plugin.replicas.control.lease_messages import (
    MAX_TEXT_CHARS,
    NO_MEETING,
    MachineReport,
    MeetingPlan,
    decode_from_server,
    encode,
)
from vllm_omni_plugin.replicas.machines.meetings import MAX_REPLACED, Meetings
from vllm_omni_plugin.replicas.machines.other_machine import Attendance, Step

TIMEOUT = 10.0
SETUP = {"model": "tiny", "--tensor-parallel-size": "4"}
PLAN = MeetingPlan(meeting=7, port=1234, number=3, incarnation=2)


def report(rank: int, process: int = 1, running: int = 0, **more: object) -> MachineReport:
    setup = more.pop("setup", SETUP)
    return MachineReport(rank, process, f"10.0.0.{rank}", setup, running, **more)  # type: ignore[arg-type]


def peer(rank: int) -> bytes:
    return b"peer %d" % rank


@pytest.fixture
def meetings() -> Meetings:
    """Of three machines, of which the others have just come."""
    meetings = Meetings(3, SETUP, TIMEOUT)
    for rank in (1, 2):
        assert meetings.report(peer(rank), report(rank), now=0.0) == [(peer(rank), NO_MEETING)]
    return meetings


@pytest.fixture
def met(meetings: Meetings) -> Meetings:
    """In a meeting since time 0."""
    assert meetings.begin(PLAN) == [(peer(1), PLAN), (peer(2), PLAN)]
    return meetings


def test_a_meeting_waits_for_every_machine_in_any_order() -> None:
    meetings = Meetings(3, SETUP, TIMEOUT)
    assert meetings.missing(0.0) == ["machine 1 (--node-rank 1)", "machine 2 (--node-rank 2)"]
    meetings.report(peer(2), report(2), now=0.0)
    assert meetings.missing(0.0) == ["machine 1 (--node-rank 1)"]
    meetings.report(peer(1), report(1), now=1.0)
    assert meetings.missing(1.0) == []
    assert meetings.addresses == ["10.0.0.1", "10.0.0.2"]


def test_a_machine_that_is_silent_or_still_runs_an_old_meeting_is_missing(meetings: Meetings) -> None:
    meetings.report(peer(1), report(1, running=6), now=TIMEOUT + 0.1)
    assert meetings.missing(TIMEOUT + 0.1) == [
        "machine 1 at 10.0.0.1, which still ends its workers",
        "machine 2 (--node-rank 2)",
    ]
    meetings.report(peer(1), report(1), now=TIMEOUT + 0.2)
    meetings.report(peer(2), report(2), now=TIMEOUT + 0.2)
    assert meetings.missing(TIMEOUT + 0.2) == []


def test_every_report_is_answered_with_the_meeting_that_goes_on(met: Meetings) -> None:
    assert met.report(peer(1), report(1, running=7), now=1.0) == [(peer(1), PLAN)]
    assert met.broken == ""
    assert met.end(6) == [], "of an engine that is gone"
    assert met.end(7) == [(peer(1), NO_MEETING), (peer(2), NO_MEETING)]
    assert met.report(peer(1), report(1, running=7), now=2.0) == [(peer(1), NO_MEETING)]


def test_a_silent_machine_breaks_the_meeting_after_the_timeout(met: Meetings) -> None:
    met.report(peer(1), report(1, running=7), now=5.0)
    met.tick(TIMEOUT)
    assert met.broken == ""
    met.tick(TIMEOUT + 0.1)
    assert met.broken == "machine 2 at 10.0.0.2 has not answered for 10 s"


def test_a_first_machine_that_stood_still_reads_all_reports_before_it_takes_a_machine_for_silent(met: Meetings) -> None:
    late = 6 * TIMEOUT
    for rank in (1, 2):
        assert met.report(peer(rank), report(rank, running=7), now=late) == [(peer(rank), PLAN)]
    met.tick(late)
    assert met.broken == ""


def test_a_machine_that_may_be_lost_is_named_before_the_timeout(met: Meetings) -> None:
    met.report(peer(1), report(1, running=7), now=2.0)
    assert met.silent(2.0, 2.0) == ""
    assert met.silent(2.1, 2.0) == "machine 2 at 10.0.0.2 has not answered for 2 s"


def test_workers_that_end_break_their_meeting_and_no_other(met: Meetings) -> None:
    met.report(peer(2), report(2, running=7, failed=6, reason="long ago"), now=1.0)
    assert met.broken == ""
    met.report(peer(2), report(2, failed=7, reason="its worker was ended by SIGKILL"), now=1.0)
    assert met.broken == "machine 2 at 10.0.0.2: its worker was ended by SIGKILL"
    met.end(7)
    met.begin(MeetingPlan(meeting=8))
    assert met.broken == ""


def test_a_process_that_was_started_again_breaks_the_meeting_and_its_predecessor_is_refused(met: Meetings) -> None:
    answers = met.report(b"new", report(1, process=2), now=1.0)
    refusal = MeetingPlan(refusal="10.0.0.1 came later with the same --node-rank 1")
    assert answers == [(peer(1), refusal), (b"new", NO_MEETING)], "it takes no part in what it broke"
    assert met.broken == "machine 1 at 10.0.0.1 was started again"
    # Its reports that were on the way bring it not back.
    assert met.report(peer(1), report(1, process=1), now=1.1) == [(peer(1), refusal)]
    assert met.report(peer(1), report(2, process=1), now=1.1) == [(peer(1), refusal)]
    met.end(7)
    assert met.missing(1.2) == []


def test_of_processes_that_were_replaced_the_last_ones_are_remembered(meetings: Meetings) -> None:
    for process in range(2, MAX_REPLACED + 10):
        meetings.report(b"again", report(1, process=process), now=1.0)
    ((_, answer),) = meetings.report(b"late", report(1, process=MAX_REPLACED + 8), now=1.0)
    assert answer.refusal
    *_, (_, answer) = meetings.report(b"first", report(1, process=2), now=1.0)
    assert not answer.refusal


def test_a_machine_with_another_setup_is_refused_by_name(meetings: Meetings) -> None:
    other = SETUP | {"--tensor-parallel-size": "8", "dtype": "half"}
    ((_, answer),) = meetings.report(b"other", report(2, process=2, setup=other), now=1.0)
    assert answer.refusal == (
        "--tensor-parallel-size is 8, and on the first machine 4; dtype is half, and on the first machine nothing"
    )
    assert meetings.missing(1.0) == [], "and takes nobody's place"


def test_a_rank_that_does_not_exist_is_refused(meetings: Meetings) -> None:
    ((_, answer),) = meetings.report(b"other", report(3), now=1.0)
    assert answer.refusal == "--node-rank 3: the first machine has --nnodes 3"


def test_a_refusal_is_not_longer_than_a_message_may_be(meetings: Meetings) -> None:
    other = SETUP | {"model": "m" * MAX_TEXT_CHARS}
    ((_, answer),) = meetings.report(b"other", report(2, process=2, setup=other), now=1.0)
    assert decode_from_server(encode(answer)) == answer


@pytest.fixture
def group() -> Meetings:
    """Of three machines that all report, in a meeting."""
    meetings = Meetings(3, SETUP, TIMEOUT, first_rank=0)
    for rank in range(3):
        meetings.report(peer(rank), report(rank), now=0.0)
    assert meetings.missing(0.0) == []
    meetings.begin(PLAN)
    return meetings


def test_a_machine_whose_ranks_do_not_wait_is_missing() -> None:
    meetings = Meetings(2, SETUP, TIMEOUT, first_rank=0)
    meetings.report(peer(0), report(0), now=0.0)
    meetings.report(peer(1), report(1, ready=False), now=0.0)
    assert meetings.missing(0.0) == ["machine 1 at 10.0.0.1, whose ranks do not start yet"]


def test_a_first_machine_that_does_not_report_is_no_other(meetings: Meetings) -> None:
    ((_, answer),) = meetings.report(peer(0), report(0), now=0.0)
    assert answer.refusal == "--node-rank 0: the first machine has --nnodes 3"


def test_all_machines_drain_when_one_leaves_and_end_when_all_have_drained(group: Meetings) -> None:
    drain, leave = replace(PLAN, drain=True), replace(PLAN, drain=True, leave=True)
    peers = [peer(rank) for rank in range(3)]
    assert group.report(peer(2), report(2, running=7, leaving=True), now=1.0) == [(each, drain) for each in peers]
    assert group.report(peer(0), report(0, running=7, drained=7), now=2.0) == [(peer(0), drain)]
    assert group.report(peer(2), report(2, running=7, leaving=True, drained=7), now=2.0) == [(peer(2), drain)]
    assert group.report(peer(1), report(1, running=7, drained=6), now=3.0) == [(peer(1), drain)], "of another meeting"
    assert group.report(peer(1), report(1, running=7, drained=7), now=3.0) == [(each, leave) for each in peers]
    # Its ranks have ended, and it has not.
    assert group.report(peer(0), report(0), now=4.0) == [(peer(0), leave)]


@pytest.mark.parametrize("failed", [0, 7])
@pytest.mark.parametrize("ends_first", [False, True])
def test_all_machines_drain_when_one_leaves_between_meetings(group: Meetings, failed: int, ends_first: bool) -> None:
    group.report(peer(1), report(1, running=7, failed=failed, reason="SIGKILL"), now=1.0)
    answers = group.end(7) if ends_first else []
    answers += group.report(peer(2), report(2, leaving=True), now=1.0)
    answers += [] if ends_first else group.end(7)
    assert [(to, plan.meeting, plan.drain) for to, plan in answers[-3:]] == [(peer(rank), 0, True) for rank in range(3)]


def test_a_machine_that_has_left_between_meetings_and_is_back_is_not_told_to_drain(meetings: Meetings) -> None:
    assert [plan.drain for _, plan in meetings.report(peer(2), report(2, leaving=True), now=1.0)] == [True, True]
    assert meetings.report(b"again", report(2, process=9), now=2.0)[-1] == (b"again", NO_MEETING)


def test_the_end_of_a_broken_meeting_says_why_but_not_at_length(group: Meetings) -> None:
    group.report(peer(1), report(1, running=7, failed=7, reason="r" * MAX_TEXT_CHARS), now=1.0)
    ended = group.end(7)
    assert len(ended) == 3
    for _, plan in ended:
        assert plan.reason.startswith("machine 1 at 10.0.0.1: rr")
        assert decode_from_server(encode(plan)) == plan


@pytest.mark.parametrize(
    ("running", "failed", "wanted", "step"),
    [
        pytest.param(0, 0, 0, None, id="nothing is to be done"),
        pytest.param(0, 0, 7, Step.START, id="a meeting begins"),
        pytest.param(7, 0, 7, None, id="it goes on"),
        pytest.param(7, 0, 0, Step.END, id="it has ended"),
        pytest.param(7, 0, 8, Step.END, id="the first machine is in another one"),
        pytest.param(7, 7, 7, None, id="its workers have failed and still end"),
        pytest.param(0, 7, 7, None, id="its workers have failed"),
        pytest.param(0, 7, 8, Step.START, id="the next one begins"),
    ],
)
def test_workers_run_in_the_meeting_of_the_first_machine_only(
    running: int, failed: int, wanted: int, step: Step | None
) -> None:
    attendance = Attendance(running, failed)
    assert attendance.follow(wanted) is step
    assert attendance.running == (wanted if step is Step.START else running)
