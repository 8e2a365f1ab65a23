"""Reports of work between heads, and the bounds of the admission file that hold for two heads together."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from tests.fakes.fleet import FakeFleet
from tests.orchestrator.work_bus import PROMPT_TOKENS, Timers, WorkBus, WorkingHead
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.balancing.replica_adapters import adapter_key
from vllm_omni_plugin.coordinator import HeadWork, ReplicaWork, SessionLost, Welcome, engine_key
from vllm_omni_plugin.coordinator.protocol.head_messages import WorkReport, encode_from_head
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.orchestrator.pool.work_exchange import REPORT_INTERVAL_S, WorkExchange
from vllm_omni_plugin.orchestrator.requests.load_ledger import Work


def work(requests: int, prefill_tokens: int = 0, replica: int = 0, incarnation: int = 0) -> ReplicaWork:
    return ReplicaWork(engine_key(0, f"in-{replica}", f"out-{replica}", incarnation), requests, prefill_tokens)


def two_heads() -> tuple[WorkBus, WorkingHead, WorkingHead]:
    bus = WorkBus()
    first, second = bus.join("a"), bus.join("b")
    bus.settle()
    bus.reports.clear()
    return bus, first, second


def others_of(member: PoolMember) -> tuple[int, int]:
    return member.load.requests, member.load.others


def test_the_first_report_leaves_at_once_and_the_next_after_the_interval_with_all_that_changed() -> None:
    bus, a, _ = two_heads()
    member = a.attach(0)
    began = bus.timers.now
    a.charge(member)
    bus.timers.advance()
    for _ in range(3):
        a.charge(member)
        bus.timers.advance(REPORT_INTERVAL_S / 4)
    assert bus.reports == [("a", began, [work(1, PROMPT_TOKENS)], False)]
    bus.timers.advance(1.0)
    assert bus.reports[1:] == [("a", began + REPORT_INTERVAL_S, [work(4, 4 * PROMPT_TOKENS)], False)]


def test_a_head_that_is_alone_reports_nothing_but_the_answer_to_a_question() -> None:
    bus = WorkBus()
    a = bus.join("a")
    bus.settle()
    a.charge(a.attach(0))
    bus.settle()
    assert [(rows, full) for _, _, rows, full in bus.reports] == [([], True)]


def test_work_on_one_incarnation_never_counts_for_another() -> None:
    bus, a, b = two_heads()
    a.charge(a.attach(0, incarnation=1))
    mine = b.attach(0, incarnation=2)
    bus.settle()
    assert mine.load.others == 0
    b.lose(mine)
    assert b.attach(0, incarnation=1).load.others == 1


def test_adapters_that_other_heads_use_are_loaded_and_become_idle_when_the_last_head_has_left_them() -> None:
    bus, a, b = two_heads()
    theirs, mine = a.attach(0), b.attach(0)
    runs = [a.charge(theirs, "x"), a.charge(theirs, "x"), b.charge(mine, "x"), b.charge(mine, "y")]
    bus.settle()
    assert (theirs.load.adapters.in_use, mine.load.adapters.in_use) == ({"x": 3, "y": 1}, {"x": 2, "y": 1})
    assert (theirs.ledger.own.adapters, mine.ledger.own.adapters) == (("x",), ("x", "y"))
    b.release(runs[2])
    a.release(runs[0])
    bus.settle()
    assert (theirs.load.adapters.in_use, mine.load.adapters.in_use) == ({"x": 1, "y": 1}, {"x": 1, "y": 1})
    a.release(runs[1])
    b.receive(SessionLost())
    assert (mine.load.adapters.in_use, mine.load.adapters.idle) == ({"y": 1}, ("x",))


def test_names_of_adapters_that_would_make_a_report_too_large_are_hashed_and_those_beyond_its_limit_left_out() -> None:
    bus, a, b = two_heads()
    theirs, mine = a.attach(0), b.attach(0)
    names = ["plain/name-1.0", "ü", 'q"', "\udcff", "l" * 41, *map(str, range(20))]
    for name in names:
        a.charge(theirs, name)
    bus.settle()
    assert list(mine.load.adapters.in_use) == [adapter_key(name) for name in names[:12]]
    ((_, _, rows, _),) = bus.reports
    encode_from_head(WorkReport(False, rows))


def test_after_a_lost_session_the_engines_reports_count_until_others_report_again() -> None:
    bus, a, b = two_heads()
    mine = b.attach(0)
    a.charge(a.attach(0))
    bus.settle()
    b.receive(SessionLost())
    assert (others_of(mine), mine.load.heads_report) == ((0, 0), False)
    bus.cut_off("b", noticed=False)
    bus.settle()
    assert others_of(mine) == (1, 1)


def test_the_policy_finds_queues_as_other_heads_have_made_them() -> None:
    bus, a, b = two_heads()
    for replica in range(12):
        b.attach(replica)
    for replica in range(11):
        a.charge(a.attach(replica))
    bus.settle()
    assert b.pool.decide({})[0].replica_id == 11


def test_a_closed_exchange_reports_no_more() -> None:
    bus, _, b = two_heads()
    mine = b.attach(0)
    b.receive(HeadWork("a", False, [work(3)]))
    b.charge(mine)
    b.exchange.close()
    b.exchange.close()
    bus.timers.advance(1.0)
    assert bus.reports == []


async def test_it_reports_by_the_running_loop_s_timers() -> None:
    reported = asyncio.Event()
    exchange = WorkExchange(lambda work, full: reported.set())
    exchange.handle(Welcome([]))
    await asyncio.wait_for(reported.wait(), 5.0)
    exchange.close()


def test_waiting_work_of_other_heads_is_known_by_class_until_they_leave() -> None:
    bus, a, b = two_heads()
    waiting = [Work(2, 50)]
    a.exchange.set_waiting("batch", lambda: waiting[-1])
    bus.settle()
    assert b.exchange.others_waiting("batch") == Work(2, 50)
    assert (b.exchange.others_waiting("other"), a.exchange.others_waiting("batch")) == (Work(), Work())
    waiting.append(Work(1, 20))
    a.exchange.set_waiting("batch", lambda: waiting[-1])
    bus.settle()
    assert b.exchange.others_waiting("batch") == Work(1, 20)
    bus.leave("a")
    bus.settle()
    assert b.exchange.others_waiting("batch") == Work()


async def test_what_waits_at_one_head_leaves_less_room_at_the_other() -> None:
    timers, heads = Timers(), list[FakeFleet]()

    def report_of(number: int) -> Callable[[Sequence[ReplicaWork], bool], None]:
        def report(work: Sequence[ReplicaWork], full: bool) -> None:
            other = heads[1 - number].exchange
            assert other is not None
            other.handle(HeadWork(str(number), full, list(work)))

        return report

    async def come(head: FakeFleet, names: str) -> list[str]:
        """Send these, one after the other; returns those that are refused."""
        for name in names:
            await head.submit(name, prompt=[1, 2])
            timers.advance(1.0)
        return [name for name, error in await head.read() if isinstance(error, RequestRefusedError)]

    async with AsyncExitStack() as stack:
        for number in range(2):
            exchange = WorkExchange(report_of(number), call_later=timers.call_later)
            head = FakeFleet(
                1,
                traits=PoolTraits(waits_for_room=True),
                exchange=exchange,
                plan=AdmissionConfig(max_waiting_requests=3),
            )
            heads.append(await stack.enter_async_context(head))
        for head in heads:
            assert head.exchange is not None
            head.exchange.handle(Welcome([]))
        timers.advance(1.0)
        # The engine of each gets the first two.
        assert await come(heads[0], "abcd") == []
        assert await come(heads[1], "efgh") == ["h"]
        assert await come(heads[0], "i") == ["i"]
        heads[0].say("a", 1)
        timers.advance(1.0)
        assert await come(heads[1], "jk") == ["k"]
