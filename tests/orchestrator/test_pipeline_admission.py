"""Requests of a pipeline come in once, before their first stage, and keep their place in the order at every stage."""

from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN, DISAGGREGATED, JOIN
from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, RequestTerms, TenantSettings
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.pipeline import Stage

LONG, SHORT = [1, 2, 3], [1, 2]
"""Prompts that a prefill computes, and that skip it."""
PREFILL, DECODE = 0, 1
CLASSES = (RequestClass(name="first", priority_at_most=0), RequestClass(name="last"))
SOON = RequestTerms(timeout_s=0.01)


def late(stages: tuple[Stage, ...], **options: Any) -> FakePipelineFleet:
    """Engines that get one request to begin and one behind it."""
    return FakePipelineFleet(stages, traits=PoolTraits(waits_for_room=True), **options)


def sent(fleet: FakePipelineFleet, stage_id: int) -> str:
    """The requests that the engine of a stage got, in order."""
    return "".join(attempt[0] for attempt in fleet.links[stage_id, 0].added)


async def submit_all(fleet: FakePipelineFleet, names: str, **fields: Any) -> None:
    for name in names:
        await fleet.submit(name, **fields)


async def prefilled(fleet: FakePipelineFleet, names: str) -> None:
    """Their prefills are done."""
    for name in names:
        fleet.tell(name, PREFILL, 9, finish_reason="length")
    await fleet.settle()


async def refusals(fleet: FakePipelineFleet) -> dict[str, str]:
    """Why which requests were refused so far."""
    await fleet.read()
    assert all(isinstance(error, RequestRefusedError) for _, error in fleet.ends), fleet.ends
    return {name: error.reason for name, error in fleet.ends}


@pytest.mark.parametrize(("prompt", "prefills", "decodes"), [(LONG, "ab", ""), (SHORT, "", "ab")])
async def test_a_request_that_waits_too_long_for_its_first_stage_is_refused_and_costs_nothing(
    prompt: list[int], prefills: str, decodes: str
) -> None:
    async with late(DISAGGREGATED) as fleet:
        await submit_all(fleet, "ab", prompt=prompt)
        await fleet.submit("c", prompt=prompt, terms=SOON)
        fleet.now = 1.1
        await eventually(lambda: "c" not in fleet.states, "the refusal")
        assert await refusals(fleet) == {"c": "deadline"}
        assert (sent(fleet, PREFILL), sent(fleet, DECODE)) == (prefills, decodes)


async def test_a_request_whose_prefill_has_begun_is_refused_no_more_however_long_it_waits_for_decode() -> None:
    plan = AdmissionConfig(classes=(*CLASSES[:1], RequestClass(name="last", deadline=1.0)), max_waiting_requests=1)
    async with late(DISAGGREGATED, plan=plan) as fleet:
        for name in "abcd":
            await fleet.submit(name, prompt=LONG, priority=1)
            await prefilled(fleet, name)
        fleet.now = 5.0
        fleet.orchestrator.tick()
        await submit_all(fleet, "efg", prompt=LONG, priority=0)
        assert await refusals(fleet) == {}
        assert (sent(fleet, PREFILL), sent(fleet, DECODE)) == ("abcdef", "ab")


@pytest.mark.parametrize(("waits", "comes"), [(LONG, SHORT), (SHORT, LONG)])
async def test_what_comes_in_at_one_stage_pushes_out_what_waits_at_the_other(
    waits: list[int], comes: list[int]
) -> None:
    async with late(DISAGGREGATED, plan=AdmissionConfig(classes=CLASSES, max_waiting_requests=1)) as fleet:
        await submit_all(fleet, "ab", prompt=LONG)
        await submit_all(fleet, "cd", prompt=SHORT)
        await fleet.submit("e", prompt=waits, priority=1)
        await fleet.submit("f", prompt=comes, priority=0)
        await eventually(lambda: "e" not in fleet.states, "the refusal")
        assert await refusals(fleet) == {"e": "pushed_out"}
        await fleet.finish()
        assert {name for name, end in fleet.ends if end == "stop"} == set("abcdf")
        assert "e" not in sent(fleet, PREFILL) + sent(fleet, DECODE)


async def test_what_waits_for_the_prefill_comes_in_at_decode_when_its_replica_is_lost() -> None:
    async with late(DISAGGREGATED) as fleet:
        await submit_all(fleet, "abc", prompt=SHORT)
        await submit_all(fleet, "de", prompt=LONG)
        await fleet.submit("f", prompt=LONG, terms=SOON)
        fleet.kill(PREFILL, 0)
        await fleet.settle()
        fleet.now = 1.1
        await eventually(lambda: "f" not in fleet.states, "the refusal")
        assert await refusals(fleet) == {"f": "deadline"}


async def test_later_stages_keep_the_order_of_classes_priorities_and_tenants() -> None:
    async with late(CHAIN, plan=AdmissionConfig(classes=CLASSES)) as fleet:
        await submit_all(fleet, "ab")
        await submit_all(fleet, "c", priority=2)
        await submit_all(fleet, "d", priority=1)
        await submit_all(fleet, "ef", terms=RequestTerms("heavy"))
        await submit_all(fleet, "g", terms=RequestTerms("light"))
        # Whatever the order in which the first stage ends them.
        for name in "abefgdc":
            await fleet.step(name, 0, count=9)
        assert sent(fleet, 1) == "ab"
        for name in "abegfd":
            fleet.tell(name, 1, 5)
        assert sent(fleet, 1) == "abegfdc"
        assert await refusals(fleet) == {}


async def test_a_tenant_at_its_limit_is_refused_until_a_request_of_its_has_ended_in_all_stages() -> None:
    plan = AdmissionConfig(default_tenant=TenantSettings(max_in_flight=1))
    async with late(CHAIN, plan=plan) as fleet:
        await fleet.submit("a")
        await fleet.step("a", 0, count=9)
        await fleet.submit("b", "text")
        assert await refusals(fleet) == {"b": "in_flight"}
        [error] = fleet.call_ends("b")
        assert isinstance(error, RequestRefusedError)
        assert fleet.orchestrator.metrics.requests_refused == {(0, "in_flight", "429"): 1}
        await fleet.finish("a")
        await fleet.submit("c")
        assert sent(fleet, 0) == "ac"


async def test_a_tenant_pays_for_the_prompt_and_for_the_answer_of_decode_once() -> None:
    async with late(DISAGGREGATED) as fleet:
        await fleet.submit("a", prompt=LONG, terms=RequestTerms("one"))
        await prefilled(fleet, "a")
        fleet.tell("a", DECODE, 5, 6, finish_reason="stop")
        _, other = fleet.orchestrator.admission.tenant_reports()
        assert (other.served_tokens, other.in_flight) == (len(LONG) + 2, 0)


async def test_of_several_stages_that_begin_with_the_request_one_alone_may_refuse_it() -> None:
    async with late(JOIN) as fleet:
        await submit_all(fleet, "ab")
        await fleet.step("a", 0, count=9)
        await fleet.submit("c", terms=SOON)
        assert (sent(fleet, 0), sent(fleet, 1)) == ("abc", "ab")
        fleet.now = 1.1
        fleet.orchestrator.tick()
        await fleet.finish()
        assert fleet.ends == [("a", "stop"), ("b", "stop"), ("c", "stop")]


async def left(fleet: FakePipelineFleet) -> tuple[int, int]:
    """Requests that wait, and that count as in flight of a tenant."""
    await fleet.settle()
    admission = fleet.orchestrator.admission
    return admission.backlog.requests, admission.tenant_reports()[1].in_flight


@pytest.mark.parametrize("end", ["finish", "abort", "lose"])
@pytest.mark.parametrize("prompt", [LONG, SHORT])
@pytest.mark.parametrize("stages", [CHAIN, DISAGGREGATED, JOIN])
async def test_nothing_of_a_tenant_is_left_when_its_requests_have_ended(
    stages: tuple[Stage, ...], prompt: list[int], end: str
) -> None:
    async with late(stages) as fleet:
        await submit_all(fleet, "abcd", prompt=prompt, terms=RequestTerms("heavy"))
        if end == "finish":
            await fleet.finish()
        elif end == "abort":
            await fleet.abort(*"abcd")
        else:
            for stage in stages:
                fleet.kill(stage.id, 0)
                await fleet.settle()
        assert await left(fleet) == (0, 0)
        assert fleet.orchestrator.metrics.queued == 0
