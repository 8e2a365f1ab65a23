"""Over-share requests leave headroom at engines for requests within their share."""

import pytest

from tests.fakes.engine_api import FakeRequest
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, RequestTerms, TenantSettings, Ticket
from vllm_omni_plugin.balancing import LeastTokensBalancer
from vllm_omni_plugin.orchestrator import StagePool, StageRun
from vllm_omni_plugin.orchestrator.dispatch.admission_gate import AdmissionGate
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import SubmitRequest
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize

from .late_fleet import CALM, EQUALS, FLOOD, ROOMY, SLOTS, SPARE, answer_first, got, late, submit_all


async def flooded(fleet: FakeFleet, requests: int, priority: int = 0) -> str:
    """So many requests of one tenant, answers to all that are sent begin. Returns those that the engine has got."""
    names = [chr(ord("a") + number) for number in range(requests)]
    for name in names:
        await fleet.submit(name, prompt=[1, 2], terms=FLOOD, priority=priority)
    link, begun = fleet.links[0], 0
    while begun < len(link.added):
        attempt = link.added[begun]
        if attempt[0] in names:
            link.output(attempt, running=sum(each[0] in names for each in link.added[: begun + 1]))
        begun += 1
    return "".join(name for name in got(link) if name in names)


async def test_a_tenant_alone_gets_all_slots() -> None:
    async with late(size=ROOMY, plan=EQUALS) as fleet:
        assert len(await flooded(fleet, 20)) >= SLOTS


async def test_a_tenant_over_its_share_leaves_slots_for_other_tenants() -> None:
    async with late(size=ROOMY, plan=EQUALS) as fleet:
        await answer_first(fleet, "0", CALM)
        assert len(await flooded(fleet, 20)) == SLOTS - SPARE
        for name in "12":
            await fleet.submit(name, prompt=[1, 2], terms=CALM)
            assert got(fleet.links[0])[-1] == name
        assert fleet.orchestrator.metrics.idle_while_waiting == 0


async def test_requests_within_their_share_go_first_and_two_are_sent_ahead_to_a_full_engine() -> None:
    async with late(size=ROOMY, plan=EQUALS) as fleet:
        await answer_first(fleet, "0", CALM)
        await flooded(fleet, 20)
        link = fleet.links[0]
        link.report(running=SLOTS)
        await submit_all(fleet, "123", terms=CALM)
        assert [name for name in got(link) if name in "123"] == ["1", "2"]
        # It begins when a slot is free, and the next one comes before all that waits of the other tenant.
        link.output(next(each for each in link.added if each[0] == "1"), running=SLOTS)
        assert got(link)[-1] == "3"


async def test_an_over_share_request_is_not_sent_behind_a_prompt_within_its_share() -> None:
    async with late(size=EngineSize(step_tokens=1000, sequences=100), plan=EQUALS) as fleet:
        await answer_first(fleet, "0", CALM)
        for name in "ab":
            await fleet.submit(name, prompt=[1] * 10, terms=FLOOD)
            fleet.say(name, 1)
        await submit_all(fleet, "1", terms=CALM)
        await submit_all(fleet, "c", terms=FLOOD)
        assert got(fleet.links[0]) == "0ab1"
        fleet.say("1", 1)
        assert got(fleet.links[0]) == "0ab1c"


async def test_shares_are_by_weight() -> None:
    plan = AdmissionConfig(tenants={"flood": TenantSettings(weight=99.0), "calm": TenantSettings(weight=0.1)})
    async with late(size=ROOMY, plan=plan) as fleet:
        await fleet.submit("0", prompt=[1, 2], terms=CALM)
        assert len(await flooded(fleet, 20)) >= SLOTS - 1


async def test_a_lower_class_leaves_headroom_for_a_higher_one_of_the_last_minute() -> None:
    plan = AdmissionConfig(classes=(RequestClass(name="first", priority_at_most=0), RequestClass(name="last")))
    for later, expected in ((1.0, SLOTS - SPARE), (61.0, SLOTS)):
        async with late(size=ROOMY, plan=plan) as fleet:
            await answer_first(fleet, "0", FLOOD)
            fleet.now = later
            assert len((await flooded(fleet, 20, priority=1))[:SLOTS]) == expected


@pytest.mark.parametrize(("prompt_tokens", "expected"), [(47, "0abc"), (48, "0ab")])
async def test_kv_memory_is_left_free_in_the_same_share(prompt_tokens: int, expected: str) -> None:
    # 5 of 100 slots and 5 of 100 blocks of one token are to stay free; a running request holds one block.
    size = EngineSize(100, 1, step_tokens=1000, sequences=100)
    async with late(plan=EQUALS, size=size) as fleet:
        await answer_first(fleet, "0", CALM)
        prompt = list(range(prompt_tokens))
        await fleet.submit("a", prompt=prompt, terms=FLOOD)
        fleet.links[0].output(fleet.attempt("a")[1], running=1)
        for name in "bc":
            await fleet.submit(name, prompt=prompt, terms=FLOOD)
        assert got(fleet.links[0]) == expected


async def test_small_prompts_are_packed_into_a_quarter_of_a_step_and_no_more() -> None:
    async with late(size=EngineSize(step_tokens=32, sequences=100), plan=EQUALS) as fleet:
        await answer_first(fleet, "0", CALM)
        await submit_all(fleet, "abcdefgh", terms=FLOOD)
        assert got(fleet.links[0]) == "0abcd"


@pytest.mark.parametrize("sequences", [0, 1, 2])
async def test_an_engine_with_few_or_unknown_slots_never_idles_for_headroom(sequences: int) -> None:
    async with late(size=EngineSize(step_tokens=8, sequences=sequences), plan=EQUALS) as fleet:
        await answer_first(fleet, "0", CALM)
        await submit_all(fleet, "abcd", terms=FLOOD)
        for name in "abcd":
            assert name in got(fleet.links[0])
            fleet.say(name, 1, finish_reason="stop", running=0)


def test_the_priority_of_a_stranger_brings_it_before_nobody() -> None:
    gate = AdmissionGate(StagePool(0, LeastTokensBalancer()), AdmissionConfig(), OrchestratorMetrics(), lambda: 0.0)

    def priority(of: int, anonymous: bool) -> int:
        terms = RequestTerms(anonymous=anonymous)
        return gate.issue_ticket(SubmitRequest(FakeRequest("a", priority=of), 0.0, terms=terms)).priority

    assert [priority(of, anonymous) for anonymous in (False, True) for of in (-5, 0, 5)] == [-5, 0, 5, 0, 0, 5]


def test_a_later_stage_does_not_change_the_place_of_a_waiting_request() -> None:
    classes = (RequestClass(name="first", priority_at_most=0), RequestClass(name="last"))
    plan = AdmissionConfig(classes=classes, max_waiting_requests=1)
    gate = AdmissionGate(StagePool(0, LeastTokensBalancer()), plan, OrchestratorMetrics(), lambda: 0.0)
    evicted: list[StageRun] = []

    def comes(name: str, priority: int) -> tuple[StageRun, Ticket]:
        ticket = gate.issue_ticket(SubmitRequest(FakeRequest(name, priority=priority), 0.0))
        run = StageRun(name, None, 0.0, ticket=ticket)
        gate.enqueue(run, ticket, lambda run, error: evicted.append(run))
        return run, ticket

    run, ticket = comes("a", 1)
    gate.started(ticket.for_later_stage())
    gate.dequeue(ticket.for_later_stage())
    comes("b", 0)
    assert evicted == [run]
