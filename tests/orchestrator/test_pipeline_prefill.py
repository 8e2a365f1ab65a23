"""A prefill stage and the one that goes on from its KV cache."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import REFUSED
from tests.fakes.pipeline_fleet import FakePipelineFleet, stage
from tests.fakes.pipelines import CHAIN, DISAGGREGATED
from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCallEnded

LONG, SHORT = [1, 2, 3], [1, 2]
PARAMS = {"remote": "here"}


def sent(fleet: FakePipelineFleet, stage_id: int, replica_id: int = 0) -> list[dict[str, Any]]:
    return fleet.links[stage_id, replica_id].requests


async def prefilled(
    fleet: FakePipelineFleet,
    cached: int | None = 2,
    params: Any = PARAMS,
    modalities: Sequence[str] = (),
    **fields: Any,
) -> None:
    """Submit a request and let its prefill be done."""
    await fleet.submit("r", *modalities, prompt=LONG, **fields)
    fleet.tell("r", 0, 9, finish_reason="length", kv_transfer_params=params, cached=cached)
    await fleet.settle()


async def test_the_decode_stage_gets_the_prefills_transfer_parameters() -> None:
    async with FakePipelineFleet(DISAGGREGATED) as fleet:
        await prefilled(fleet)
        assert sent(fleet, 0)[0]["length"] == 1
        assert sent(fleet, 1)[0]["sampling_params"]["kv"] == PARAMS
        assert sent(fleet, 1)[0]["sampling_params"]["for_client"] is True
        await fleet.finish()
        assert fleet.ends == [("r", "stop")]
        assert 9 not in fleet.tokens["r"]


async def test_a_prefill_may_return_no_transfer_parameters() -> None:
    async with FakePipelineFleet(DISAGGREGATED) as fleet:
        await prefilled(fleet, params=None)
        assert "kv" not in sent(fleet, 1)[0]["sampling_params"]
        fleet.tell("r", 1, 5, cached=3)
        await fleet.read()
        assert fleet.cached["r"] == [2]


@pytest.mark.parametrize(("cached", "reported"), [(2, [2]), (0, [0]), (None, [0])])
async def test_cached_tokens_are_those_that_the_prefill_found(cached: int | None, reported: list[int]) -> None:
    async with FakePipelineFleet(DISAGGREGATED) as fleet:
        await prefilled(fleet, cached)
        fleet.tell("r", 1, 5, cached=3)
        await fleet.read()
        assert fleet.cached["r"] == reported


async def test_a_request_that_skips_the_prefill_fails_if_paused_engines_refuse_it() -> None:
    async with FakePipelineFleet(DISAGGREGATED) as fleet:
        await fleet.submit("r", prompt=SHORT)
        fleet.tell("r", 1, finish_reason=REFUSED)
        await fleet.read()
        assert [name for name, _ in fleet.ends] == ["r"]


async def test_a_prefilled_request_waits_for_paused_engines() -> None:
    async with FakePipelineFleet(DISAGGREGATED) as fleet:
        await prefilled(fleet)
        fleet.tell("r", 1, finish_reason=REFUSED)
        await fleet.read()
        assert (fleet.ends, fleet.orchestrator.metrics.paused) == ([], 1)


async def test_work_from_another_stages_output_waits_for_paused_engines() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text")
        await fleet.step("r", 0, count=9)
        fleet.tell("r", 1, finish_reason=REFUSED)
        await fleet.read()
        assert (fleet.call_ends("r"), fleet.orchestrator.metrics.paused) == ([], 1)


async def test_short_prompts_skip_the_prefill_and_keep_the_engines_cached_tokens() -> None:
    async with FakePipelineFleet(DISAGGREGATED) as fleet:
        await fleet.submit("r", prompt=SHORT)
        assert sent(fleet, 0) == []
        assert "kv" not in sent(fleet, 1)[0]["sampling_params"]
        fleet.tell("r", 1, 5, cached=1)
        await fleet.read()
        assert fleet.cached["r"] == [1]


async def test_without_a_prefill_replica_the_decode_stage_computes() -> None:
    async with FakePipelineFleet(DISAGGREGATED, replicas=[0, 1], replica_wait=600.0) as fleet:
        await fleet.submit("r", prompt=LONG)
        await fleet.finish()
        assert fleet.ends == [("r", "stop")]
        assert fleet.orchestrator.can_serve


@pytest.mark.parametrize("fault", ["lost", "abort", "error", StageInputError("too long"), KeyError("gone")], ids=str)
async def test_the_decode_stage_computes_the_prompt_if_the_prefill_fails_or_cannot_be_built(
    fault: str | Exception,
) -> None:
    async with FakePipelineFleet(DISAGGREGATED, replicas=[2, 1]) as fleet:
        if isinstance(fault, Exception):
            fleet.apis[0].faults["build_root"] = fault
        await fleet.submit("r", "text", prompt=LONG)
        if fault == "lost":
            fleet.attempt("r", 0)[0].say_dead()
        elif isinstance(fault, str):
            fleet.tell("r", 0, finish_reason=fault)
        await fleet.settle()
        assert "kv" not in sent(fleet, 1)[0]["sampling_params"]
        await fleet.finish()
        assert fleet.ends == [("r", "stop")]
        assert fleet.call_ends("r") == [None]
        assert fleet.in_flight == 0
        assert not any(fleet.orchestrator.metrics.requests_failed.values()), "no client got an error"


async def test_a_prefill_whose_last_replica_is_lost_before_it_was_sent_took_no_time(gate: threading.Event) -> None:
    async with FakePipelineFleet(DISAGGREGATED, replica_wait=600.0) as fleet:
        build = fleet.apis[0].build_root
        fleet.apis[0].build_root = lambda *a, **k: (gate.wait(30), build(*a, **k))[1]  # type: ignore[method-assign]
        await fleet.submit("r", "text", prompt=LONG, settle=False)
        fleet.now = 7.0
        fleet.lose(0, 0)
        gate.set()
        await fleet.finish()
        ended = fleet.events["r"][-1]
        assert isinstance(ended, PipelineCallEnded)
        assert ended.timings["prefill"] == {"transfer": 7.0}


async def test_a_request_that_has_ended_begins_no_decode_when_its_prefill_cannot_be_built(
    gate: threading.Event,
) -> None:

    def build(*_: Any, **__: Any) -> Any:
        gate.wait(30)
        raise StageInputError("too long")

    async with FakePipelineFleet(DISAGGREGATED) as fleet:
        fleet.apis[0].build_root = build  # type: ignore[method-assign]
        await fleet.submit("r", prompt=LONG, settle=False)
        await eventually(lambda: fleet.states)
        await fleet.abort("r")
        gate.set()
        await fleet.settle()
        assert sent(fleet, 1) == []


@pytest.mark.parametrize("params", [PARAMS, None], ids=["parameters", "a store"])
@pytest.mark.parametrize("delivered", [False, True])
async def test_a_lost_decode_goes_on_without_the_cache_that_was_fetched_already(
    delivered: bool, params: dict[str, str] | None
) -> None:
    async with FakePipelineFleet(DISAGGREGATED, replicas=[1, 2]) as fleet:
        await prefilled(fleet, params=params)
        link, attempt = fleet.attempt("r", 1)
        assert "cache" not in link.requests[0]["sampling_params"]
        if delivered:
            link.tell(attempt, 5, cached=3)
        link.say_dead()
        await fleet.settle()
        link, attempt = fleet.attempt("r", 1)
        (request,) = link.requests
        assert "kv" not in request["sampling_params"]
        assert request["sampling_params"]["cache"] is False
        assert request["prompt"] == [*LONG, *([5] if delivered else [])]
        link.tell(attempt, 6, cached=1, finish_reason="stop")
        await fleet.read()
        assert fleet.tokens["r"] == ([5, 6] if delivered else [6])
        assert fleet.cached["r"][0] == (2 if delivered else 1)
        assert fleet.ends == [("r", "stop")]


async def test_every_attempt_has_the_seed_that_makes_its_answer_repeatable() -> None:
    async with FakePipelineFleet(DISAGGREGATED, replicas=[1, 2]) as fleet:
        seeds = iter(range(10))

        def make_movable(request: Any) -> Any:
            params = request.sampling_params
            if "seed" in params:
                return request
            return msgspec.structs.replace(request, sampling_params={**params, "seed": next(seeds)})

        fleet.apis[1].make_movable = make_movable  # type: ignore[method-assign]
        await prefilled(fleet)
        fleet.attempt("r", 1)[0].say_dead()
        await fleet.settle()
        first, second = (request for replica_id in range(2) for request in sent(fleet, 1, replica_id))
        assert first["sampling_params"]["seed"] == second["sampling_params"]["seed"] == 0


async def test_a_decode_stage_that_does_not_answer_has_the_files_sampling_in_every_attempt() -> None:
    stages = (*DISAGGREGATED[:1], stage(1, "decode", "text", "prefill", model="one", transform="kv_transfer"))
    async with FakePipelineFleet((*stages, stage(2, "refiner", "text", "decode", final=True)), [1, 2, 1]) as fleet:
        await prefilled(fleet, modalities=("text",), sampling={"decode": {"top_k": 3}})
        fleet.attempt("r", 1)[0].say_dead()
        await fleet.settle()
        params = [request["sampling_params"] for replica_id in range(2) for request in sent(fleet, 1, replica_id)]
        assert [(each["for_client"], each["top_k"]) for each in params] == [(False, 3)] * 2
        await fleet.step("r", 1, count=9)
        fleet.tell("r", 2, 5, cached=1)
        await fleet.finish()
        assert fleet.cached == {"r": [1]}


SECOND = (
    stage(2, "second prefill", "kv_cache", model="two"),
    stage(3, "second decode", "text", "second prefill", model="two", transform="kv_transfer"),
    stage(4, "vocoder", "audio", "second decode", engine="acme.stages:Any", final=True),
)


@pytest.mark.parametrize("leaves", [False, True])
async def test_each_of_two_decodes_fetches_or_frees_the_cache_of_its_own_prefill(
    gate: threading.Event, leaves: bool
) -> None:
    async with FakePipelineFleet((*DISAGGREGATED, *SECOND)) as fleet:
        await fleet.submit("r", "text", "audio", prompt=LONG)
        for decode in (1, 3):
            # Neither is built before both prefills have ended.
            build = fleet.apis[decode].build_root
            fleet.apis[decode].build_root = partial(wait_and_build, gate, build)  # type: ignore[method-assign]
        for prefill in (0, 2):
            fleet.tell("r", prefill, 9, finish_reason="length", kv_transfer_params={"of": prefill}, cached=prefill + 1)
        await eventually(lambda: {0, 2} <= fleet.states["r"].ended.keys(), "the end of both prefills")
        if leaves:
            await fleet.abort("r")
        gate.set()
        await fleet.settle()
        fetched = {decode: [each["sampling_params"].get("kv") for each in sent(fleet, decode)] for decode in (1, 3)}
        assert fetched == {1: [{"of": 0}], 3: [{"of": 2}]}
        if not leaves:
            fleet.tell("r", 1, 5, cached=7)
            await fleet.read()
            assert fleet.cached["r"] == [1]


def wait_and_build(gate: threading.Event, build: Any, *args: Any, **fields: Any) -> Any:
    gate.wait(30)
    return build(*args, **fields)
