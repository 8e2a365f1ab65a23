"""Requests through the stages of a pipeline: the stages that run, their order, and the outputs."""

from collections.abc import Sequence

import pytest

from tests.fakes.observations import observed
from tests.fakes.pipeline_fleet import FakePipelineFleet, stage
from tests.fakes.pipelines import CHAIN, DIAMOND, FAN_OUT, JOIN, SPEECH
from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ChosenReplicas, PipelineCallEnded, StageEvent
from vllm_omni_plugin.pipeline import Stage


def running(fleet: FakePipelineFleet, request_id: str) -> list[str]:
    runs = fleet.states[request_id].runs
    return [fleet.pipeline.stages[stage_id].name for stage_id, run in sorted(runs.items()) if not run.finished]


async def test_other_stages_of_a_plain_request_end_with_its_answer() -> None:
    twins = (stage(0, "first", "text", final=True), stage(1, "second", "text", final=True))
    async with FakePipelineFleet(twins) as fleet:
        await fleet.submit("r")
        link, attempt = fleet.attempt("r", 0)
        await fleet.step("r", 1, count=9)
        assert fleet.ends == [("r", "stop")]
        assert link.aborted == [attempt]
        assert fleet.in_flight == 0


@pytest.mark.parametrize(
    ("stages", "modalities", "expected"),
    [
        pytest.param(SPEECH, ["text"], {"thinker"}, id="text alone skips the talker"),
        pytest.param(SPEECH, ["text", "audio"], {"thinker", "talker", "vocoder"}, id="speech beside text"),
        pytest.param(SPEECH, ["audio"], {"thinker", "talker", "vocoder"}, id="speech alone"),
        pytest.param(FAN_OUT, ["text", "image"], {"thinker", "painter"}, id="one branch of two"),
        pytest.param(FAN_OUT, ["text", "scores", "image"], {"thinker", "judge", "painter"}, id="both branches"),
        pytest.param(JOIN, ["text"], {"thinker", "doubter", "judge"}, id="join"),
        pytest.param(DIAMOND, ["text"], {"thinker", "left", "right", "judge"}, id="diamond"),
    ],
)
async def test_the_stages_that_are_needed_run_once_each(
    stages: Sequence[Stage], modalities: list[str], expected: set[str]
) -> None:
    async with FakePipelineFleet(stages) as fleet:
        await fleet.submit("r", *modalities)
        await fleet.finish()
        ran = {stages[stage_id].name for (stage_id, _), link in fleet.links.items() if link.requests}
        assert ran == expected
        assert all(len(set(link.added)) <= 1 for link in fleet.links.values())
        assert fleet.ends == [("r", "stop")]
        assert fleet.call_ends("r") == [None]
        assert isinstance(fleet.events["r"][-1], PipelineCallEnded)


async def test_a_join_waits_for_all_its_inputs_and_gets_them_in_their_order() -> None:
    async with FakePipelineFleet(DIAMOND) as fleet:
        await fleet.submit("r", "text", outputs=["left", "right"])
        await fleet.step("r", 0, count=9)
        assert running(fleet, "r") == ["left", "right"]
        await fleet.step("r", 2, count=9)
        assert running(fleet, "r") == ["left"]
        await fleet.step("r", 1, count=9)
        link, attempt = fleet.attempt("r", 3)
        assert link.prompts[attempt] == fleet.shown("r", "left") + fleet.shown("r", "right")


async def test_the_clients_sampling_is_for_the_answering_stage_and_others_are_named() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text", sampling={"thinker": {"top_k": 7}})
        await fleet.finish()
        thinker, refiner = (fleet.links[stage_id, 0].requests[0]["sampling_params"] for stage_id in (0, 1))
        assert thinker == {"stage": "thinker", "for_client": False, "top_k": 7}
        assert refiner == {"stage": "refiner", "for_client": True}


async def test_events_come_with_each_output_and_the_last_has_a_finish_reason() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text", prompt=[3])
        for _ in range(4):
            await fleet.step("r", 0)
        events = [event for event in fleet.events["r"] if isinstance(event, StageEvent)]
        assert [event.output.token_ids for event in events] == [[4], [7], [10], [13]]
        assert [event.output.finish_reason for event in events] == [None, None, None, "stop"]
        assert [event.output.text for event in events] == ["e", "h", "k", "n"]


async def test_a_stop_string_ends_a_stage_that_is_read_here() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text", prompt=[3], stop=10)
        link, attempt = fleet.attempt("r", 0)
        for _ in range(3):
            await fleet.step("r", 0)
        assert link.aborted == [attempt]
        assert running(fleet, "r") == ["refiner"]
        link, attempt = fleet.attempt("r", 1)
        assert link.prompts[attempt] == [4, 7]


async def test_a_client_id_that_comes_again_ends_the_request_that_had_it() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text")
        first, (link, attempt) = fleet.events["r"], fleet.attempt("r", 0)
        await fleet.submit("r", "text")
        assert link.aborted == [attempt]
        assert [type(event) for event in first] == [PipelineCallEnded]
        await fleet.finish()
        assert fleet.ends == [("r", "stop")]
        assert fleet.call_ends("r") == [None]


async def test_streaming_input_is_refused_with_an_error_and_an_end() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text", resumable=True)
        ((request_id, error),) = fleet.ends
        assert request_id == "r"
        assert isinstance(error, StageInputError)
        assert fleet.call_ends("r") == [error]
        assert fleet.states == {}


async def test_unknown_modalities_are_refused_and_do_not_affect_other_requests() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("bad", "image")
        await fleet.submit("good", "text")
        await fleet.finish()
        assert [type(end) for _, end in fleet.ends] == [StageInputError, str]
        assert str(fleet.ends[0][1]).startswith("'image' asked for, but ")
        assert len(fleet.call_ends("bad")) == len(fleet.call_ends("good")) == 1


async def test_a_request_that_only_cleans_up_runs_nowhere() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", abort_immediately=True)
        assert fleet.states == {}
        assert fleet.ends == []
        assert all(not link.requests for link in fleet.links.values())


async def test_calls_end_with_the_orchestrator() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text")
        await fleet.submit("plain")
    (error,) = fleet.call_ends("r")
    assert "shut down" in str(error)
    assert fleet.states == {}


async def test_each_stage_is_timed_and_its_send_noted() -> None:
    chosen_replicas: ChosenReplicas = []
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text", chosen_replicas=chosen_replicas)
        fleet.now += 2.0
        await fleet.step("r", 0)
        fleet.now += 1.0
        await fleet.finish()
        assert [name for name, _ in chosen_replicas] == ["0.0", "1.0"]
        ended = fleet.events["r"][-1]
        assert isinstance(ended, PipelineCallEnded)
        assert set(ended.timings) == {"thinker", "refiner"}
        assert ended.timings["thinker"] == {"transfer": 0.0, "queue": 0.0, "first_output": 2.0, "run": 3.0}
        assert observed(fleet.orchestrator.metrics.stage_seconds.labels("0", "thinker", "first_output")) == (1, 2.0)


@pytest.mark.parametrize("end", ["completed", "aborted", "failed"])
async def test_a_traced_request_reports_the_times_of_its_stages_once(end: str) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.now = 1.0
        await fleet.submit("r", "text", traced=True)
        fleet.now = 3.0
        await fleet.step("r", 0, count=9)
        fleet.now = 4.0
        if end == "completed":
            await fleet.finish()
        elif end == "aborted":
            await fleet.abort("r", whole=True)
        else:
            fleet.lose(1, 0)
        await fleet.read()
        (trace,) = fleet.traces
        assert trace.request_id == "r"
        thinker, refiner = trace.stages
        assert (thinker.stage_id, thinker.stage, thinker.began_at, thinker.ended_at) == (0, "thinker", 1.0, 3.0)
        assert (refiner.stage_id, refiner.stage, refiner.began_at, refiner.ended_at) == (1, "refiner", 3.0, 4.0)
        assert thinker.parts["run"] == 2.0
        assert ("run" in refiner.parts) == (end == "completed")
