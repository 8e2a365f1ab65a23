"""Transforms, engines and clients that misbehave: one clear error for the request, and nothing for any other."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.pipeline_fleet import FakePipelineFleet, stage
from tests.fakes.pipelines import CHAIN, FAN_OUT, PYTHON, SPEECH
from tests.fakes.transforms import leaving, raising, raising_bytes, refusing
from vllm_omni_plugin.errors import NoReplicaError, RequestLostError, StageError, StageInputError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCallEnded, StageEvent
from vllm_omni_plugin.pipeline import Stage

JUDGED = (stage(0, "thinker", "text", final=True), stage(1, "judge", "scores", final=True))
"""Two stages that know nothing of each other."""

GATED = (
    stage(0, "writer", "text"),
    stage(1, "gate", "text", "writer", engine=PYTHON, final=True),
    stage(2, "speaker", "audio", "writer", engine=PYTHON, final=True),
)

RETURNS = [
    pytest.param(raising, StageError, "its transform failed: RuntimeError: no idea", id="raises"),
    pytest.param(raising_bytes, StageError, "failed: ValueError: no file \\udcff", id="raises with bytes"),
    pytest.param(leaving, StageError, "its transform failed: SystemExit", id="ends the process"),
    pytest.param(refusing, StageInputError, "no such voice", id="blames the client"),
    pytest.param("nothing", StageError, "returned nothing", id="returns nothing"),
    pytest.param(3.5, StageError, "returned a value of type float", id="returns rubbish"),
    pytest.param([1, -1], StageError, "token ids", id="returns what is no token"),
    pytest.param("x" * 1001, StageInputError, "the input is too long", id="returns too much"),
]


def the_error(fleet: FakePipelineFleet, request_id: str) -> Exception:
    """The error of a request, which its call also got, once."""
    (error,) = (end for name, end in fleet.ends if name == request_id)
    assert isinstance(error, Exception)
    assert fleet.call_ends(request_id) == [error]
    assert isinstance(fleet.events[request_id][-1], PipelineCallEnded)
    return error


@pytest.mark.parametrize(
    ("stages", "asked", "name"),
    [
        pytest.param(CHAIN, ["text"], "refiner", id="whole"),
        pytest.param(SPEECH, ["text", "audio"], "talker", id="chunks"),
    ],
)
@pytest.mark.parametrize(("transform", "kind", "text"), RETURNS)
async def test_a_transform_that_fails_is_one_error_that_names_the_stage(
    stages: Sequence[Stage], asked: list[str], name: str, transform: Any, kind: type[Exception], text: str
) -> None:
    async with FakePipelineFleet(stages) as fleet:
        await fleet.submit("r", *asked, params={name: transform})
        await fleet.submit("other", "text")
        await fleet.finish()
        (error,) = fleet.call_ends("r")
        assert isinstance(fleet.events["r"][-1], PipelineCallEnded)
        assert ("r", error) in fleet.ends
        assert type(error) is kind
        assert str(error).startswith(f"Stage {name!r}: ")
        assert text in str(error)
        assert fleet.call_ends("other") == [None]
        assert fleet.in_flight == 0


async def test_a_transform_that_blocks_delays_only_its_own_request(gate: threading.Event) -> None:
    async with FakePipelineFleet(FAN_OUT) as fleet:
        for number in range(4):
            transform = {"judge": lambda transfer: gate.wait(30) and None}
            await fleet.submit(f"slow{number}", "text", "scores", params=transform, settle=False)
        await fleet.submit("quick", "text", "image", settle=False)
        await eventually(lambda: len(list(fleet.at_work(list(fleet.states)))) == 5)
        for name, stage_id in list(fleet.at_work(list(fleet.states))):
            link, attempt = fleet.attempt(name, stage_id)
            link.step(attempt, 9)
        await eventually(lambda: 2 in fleet.states["quick"].runs)
        link, attempt = fleet.attempt("quick", 2)
        link.step(attempt)
        await fleet.read()
        assert fleet.call_ends("quick") == [None]
        assert ("slow0", "stop") in fleet.ends
        await fleet.abort("slow0", whole=True)
        assert [str(error) for error in fleet.call_ends("slow0")] == ["The request was aborted."]
        gate.set()
        await fleet.finish()
        assert [fleet.call_ends(f"slow{number}") for number in range(1, 4)] == [[None]] * 3
        assert len(fleet.links[1, 0].requests) == 3


async def test_queued_work_of_an_aborted_request_is_skipped(gate: threading.Event) -> None:
    done: list[str] = []

    def transform(transfer: Any) -> None:
        done.append(transfer.request_id)
        gate.wait(30)

    names = [f"r{number}" for number in range(4)]
    async with FakePipelineFleet(CHAIN) as fleet:
        for name in names:
            await fleet.submit(name, "text", params={"refiner": transform}, settle=False)
        await eventually(lambda: len(list(fleet.at_work(list(fleet.states)))) == 4)
        for name in names:
            link, attempt = fleet.attempt(name, 0)
            link.step(attempt, 9)
        await eventually(lambda: len(done) == 2, "both threads at work")
        await fleet.abort(*names[:3], whole=True)
        gate.set()
        await fleet.finish()
        assert set(done) == {"r0", "r1", "r3"}
        assert fleet.call_ends("r3") == [None]


async def test_a_built_input_is_dropped_if_its_id_belongs_to_a_new_request(gate: threading.Event) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text", params={"refiner": lambda transfer: gate.wait(30) and [7, 7]})
        link, attempt = fleet.attempt("r", 0)
        link.step(attempt, 9)
        await fleet.submit("r", "text")
        gate.set()
        await fleet.finish()
        assert [body["prompt"] for body in fleet.links[1, 0].requests] != [[7, 7]]
        assert len(fleet.links[1, 0].requests) == 1
        assert fleet.call_ends("r") == [None]


async def test_a_request_that_the_answering_stage_cannot_answer_is_refused_before_any_stage_begins() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        refusal = fleet.apis[-1].faults["check_answerable"] = StageInputError("Stage 'last': no logprobs")
        await fleet.submit("r", "text")
        error = the_error(fleet, "r")
        assert (type(error), str(error)) == (StageInputError, str(refusal))
        assert (fleet.states, fleet.in_flight) == ({}, 0)
        assert not any(link.requests for link in fleet.links.values())


@pytest.mark.parametrize(
    ("method", "stage_id"),
    [("build_root", 0), ("build", 1), ("reader", 0), ("reader", 1), ("read", 0), ("read", 1), ("answer", 1)],
)
@pytest.mark.parametrize("fault", [KeyError("gone"), SystemExit("gone")], ids=lambda fault: type(fault).__name__)
async def test_an_api_that_fails_ends_its_request_and_nothing_else(
    method: str, stage_id: int, fault: BaseException
) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        fleet.apis[stage_id].faults[method] = fault
        await fleet.submit("r", "text", outputs=["thinker", "refiner"])
        await fleet.finish()
        error = the_error(fleet, "r")
        assert isinstance(error, StageError)
        assert str(error).startswith(f"Stage '{fleet.pipeline.stages[stage_id].name}': ")
        assert "gone" in str(error)
        assert fleet.in_flight == 0
        fleet.apis[stage_id].faults.clear()
        await fleet.submit("next", "text")
        await fleet.finish()
        assert fleet.call_ends("next") == [None]


async def test_the_servers_abort_of_an_answer_that_it_cut_at_a_stop_string_leaves_the_rest_alone() -> None:
    async with FakePipelineFleet(SPEECH) as fleet:
        await fleet.submit("r", "text", "audio", prompt=[3], stop=10)
        for _ in range(3):
            await fleet.step("r", 0)
        await fleet.abort("r")
        assert fleet.call_ends("r") == []
        await fleet.finish()
        assert fleet.call_ends("r") == [None]


async def test_the_servers_abort_of_an_unread_answering_stage_ends_only_that_stage() -> None:
    async with FakePipelineFleet(JUDGED) as fleet:
        await fleet.submit("r", "text", "scores")
        link, attempt = fleet.attempt("r", 0)
        await fleet.abort("r")
        assert link.aborted == [attempt]
        await fleet.finish()
        assert fleet.call_ends("r") == [None]


async def test_the_servers_abort_of_a_python_stages_answer_at_a_stop_string_ends_that_stage_alone() -> None:
    async with FakePipelineFleet(GATED) as fleet:
        await fleet.submit("r", "text", "audio", outputs=["gate"])
        await fleet.step("r", 0, count=9)
        link, attempt = fleet.attempt("r", 1)
        await fleet.abort("r")
        assert link.aborted == [attempt]
        assert fleet.call_ends("r") == []
        await fleet.finish()
        assert fleet.call_ends("r") == [None]
        shown = [event for event in fleet.events["r"] if isinstance(event, StageEvent) and event.stage == "gate"]
        assert [event.output.finish_reason for event in shown] == ["stop"]


async def test_the_servers_abort_before_the_answer_has_begun_means_that_its_client_has_left() -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text")
        await fleet.abort("r")
        assert len(fleet.call_ends("r")) == 1
        assert fleet.in_flight == 0


@pytest.mark.parametrize(
    ("reason", "words"),
    [("abort", "was paused or put to sleep, which aborted the request."), ("error", "gave the request up.")],
)
async def test_an_engine_that_cuts_a_stage_in_the_middle_short_is_named(reason: str, words: str) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text")
        fleet.tell("r", 0, finish_reason=reason)
        await fleet.read()
        assert str(the_error(fleet, "r")) == f"Stage 'thinker': its engine {words}"


@pytest.mark.parametrize(("stages", "stage_id"), [(CHAIN, 0), (CHAIN, 1), (GATED, 1)])
async def test_a_plain_request_that_an_engine_aborts_ends_as_with_one_engine(
    stages: Sequence[Stage], stage_id: int
) -> None:
    async with FakePipelineFleet(stages) as fleet:
        await fleet.submit("r")
        for upstream in range(stage_id):
            await fleet.step("r", upstream, count=9)
        fleet.tell("r", stage_id, finish_reason="abort")
        await fleet.read()
        assert fleet.ends == [("r", "abort")]
        assert fleet.states == {}
        assert fleet.in_flight == 0


async def test_the_finish_reason_of_an_answering_stage_that_is_cut_short_is_delivered() -> None:
    async with FakePipelineFleet(FAN_OUT) as fleet:
        await fleet.submit("r", "text", "scores")
        fleet.tell("r", 0, finish_reason="abort")
        await fleet.read()
        assert fleet.ends == [("r", "abort")]
        (error,) = fleet.call_ends("r")
        assert isinstance(error, StageError)
        assert fleet.states == {}


@pytest.mark.parametrize(("status", "kind"), [(400, StageInputError), (500, StageError)])
async def test_the_error_of_a_python_stage_has_its_status(status: int, kind: type[Exception]) -> None:
    async with FakePipelineFleet(FAN_OUT) as fleet:
        await fleet.submit("r", "image")
        await fleet.step("r", 0, count=9)
        link, attempt = fleet.attempt("r", 2)
        told = {"error": "Stage 'painter': no canvas", "status": status}
        link.tell(attempt, finish_reason="error", kv_transfer_params=told)
        await fleet.read()
        error = the_error(fleet, "r")
        assert (type(error), str(error)) == (kind, "Stage 'painter': no canvas")


@pytest.mark.parametrize("held", [False, True])
async def test_a_stage_without_replicas_fails_its_requests_and_no_others(held: bool) -> None:
    wait = 600.0 if held else 0.0
    async with FakePipelineFleet(FAN_OUT, replicas=[1, 0, 1], replica_wait=wait) as fleet:
        await fleet.submit("r", "text", "scores")
        await fleet.submit("other", "text", "image")
        await fleet.finish("other")
        assert fleet.call_ends("other") == [None]
        if held:
            await fleet.step("r", 0, count=9)
            assert [fleet.orchestrator.metrics.waiting_in[stage]().held for stage in range(3)] == [0, 1, 0]
            fleet.join(fleet.pools[1].add(0))
            await fleet.finish()
            assert fleet.call_ends("r") == [None]
        else:
            await fleet.finish()
            (error,) = fleet.call_ends("r")
            assert isinstance(error, NoReplicaError)
            assert str(error).startswith("Stage 'judge': No replica of stage 1 can serve")


async def test_the_moves_of_one_stage_do_not_count_for_another() -> None:
    async with FakePipelineFleet(CHAIN, replicas=2, migration_limit=1) as fleet:
        await fleet.submit("r", "text", move="replay")
        for stage_id in (0, 1):
            fleet.attempt("r", stage_id)[0].say_dead()
            await fleet.step("r", stage_id, count=9)
        assert fleet.call_ends("r") == [None]


@pytest.mark.parametrize("delivered", [False, True])
async def test_the_last_replica_of_a_stage_is_lost(delivered: bool) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text", move="replay")
        if delivered:
            await fleet.step("r", 0)
        fleet.lose(0, 0)
        await fleet.read()
        ((_, error),) = fleet.ends
        assert type(error) is (RequestLostError if delivered else NoReplicaError)
        assert str(error).startswith("Stage 'thinker': ")
        assert fleet.call_ends("r") == [error]
