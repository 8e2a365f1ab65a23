"""Events of replicas are logged once, and kept."""

import logging
import threading

import pytest

from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.orchestrator.event_log import MAX_EVENTS, MAX_REASON, EventKind, EventLog
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON


def seen(fleet: FakeFleet) -> list[tuple[str, str | None, int]]:
    return [(event.kind.value, event.replica, event.requests) for event in fleet.orchestrator.events.after()]


def test_an_event_has_time_kind_place_and_reason() -> None:
    log = EventLog(lambda: 12.5, "a")
    member = FakeFleet(replicas=2).pool.member(1)
    log.record(EventKind.RESTART, "in 2 s: it died", member)
    log.record(EventKind.REFUSE, "dtype", stage=3, level=logging.ERROR)
    log.record(EventKind.DRAIN, "an operator drains it")
    assert [(each.id, each.time, each.kind, each.stage, each.replica, each.reason) for each in log.after()] == [
        ("a-1", 12.5, "restart", 0, "0.1", "in 2 s: it died"),
        ("a-2", 12.5, "refuse", 3, None, "dtype"),
        ("a-3", 12.5, "drain", None, None, "an operator drains it"),
    ]
    assert [each.id for each in log.after("a-2")] == ["a-3"]
    assert log.after("a-3") == []
    assert len(log.after("of-another-process-3")) == 3


def test_an_event_is_one_log_line_with_fields_for_formatters(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = EventLog()
    member = FakeFleet(replicas=2).pool.member(1)
    caplog.clear()
    log.record(EventKind.LOST, "100% of <b>it</b>", member, requests=3)
    log.record(EventKind.REFUSE, "dtype", stage=3, level=logging.ERROR)
    lost, refused = caplog.records
    assert lost.getMessage() == "Replica 0.1 is lost (100% of <b>it</b>) with 3 requests in flight."
    assert (lost.levelname, lost.filename) == ("ERROR", "test_event_log.py")
    fields = ("omni_event", "omni_stage", "omni_replica", "omni_requests")
    assert [getattr(lost, name) for name in fields] == ["lost", 0, "0.1", 3]
    assert (refused.levelname, refused.getMessage()) == ("ERROR", "A replica of stage 3 cannot be attached to: dtype")


def test_a_reason_is_one_line_of_bounded_length(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    log.record(EventKind.REFUSE, "a\r\nb\nc")
    log.record(EventKind.REFUSE, "x" * 5000)
    assert [event.reason for event in log.after()] == ["a b c", "x" * MAX_REASON]
    assert "\n" not in caplog.records[0].getMessage()


def test_events_of_several_threads_keep_the_order_of_their_ids() -> None:
    log = EventLog(name="a")
    together = threading.Barrier(4)

    def note() -> None:
        together.wait()
        for _ in range(200):
            log.record(EventKind.DRAIN, "", level=logging.DEBUG)
            log.after()

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.id for event in log.after()] == [f"a-{number}" for number in range(1, 801)]


def test_the_last_thousand_are_kept() -> None:
    log = EventLog(name="a")
    for _ in range(MAX_EVENTS + 5):
        log.record(EventKind.DRAIN, "")
    kept = log.after()
    assert (len(kept), kept[0].id, kept[-1].id) == (MAX_EVENTS, "a-6", f"a-{MAX_EVENTS + 5}")
    assert len(log.after("a-1")) == MAX_EVENTS, "so the client sees by the numbers that some are missing"


def test_on_event_is_called_for_each_event() -> None:
    log, counts = EventLog(), []
    log.on_event = lambda: counts.append(len(log.after()))
    log.record(EventKind.DRAIN, "")
    log.record(EventKind.RESUME, "")
    assert counts == [1, 2]


async def test_the_loss_of_many_requests_is_one_event_and_their_move_another(fleet: FakeFleet) -> None:
    for number in range(20):
        await fleet.submit(f"r{number}")
    before = len(fleet.pool.member(1).in_flight)
    fleet.kill(1)
    assert seen(fleet) == [("lost", "0.1", before), ("move", "0.1", before)]


async def test_a_drain_and_its_end_are_one_event_each(fleet: FakeFleet) -> None:
    member = fleet.pool.member(1)
    for change in [fleet.orchestrator.cordon] * 2 + [fleet.orchestrator.uncordon] * 2:
        change(member, ADMIN_CORDON)
    assert seen(fleet) == [("drain", "0.1", 0), ("resume", "0.1", 0)]
    assert [event.reason for event in fleet.orchestrator.events.after()] == [
        "an operator drains it",
        "an operator resumes it",
    ]
