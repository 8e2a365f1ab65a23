"""Between the front end's sockets and the orchestrator: all messages, and a front end that is replaced."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.outputs import RequestError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from tests.fakes.conditions import eventually
from tests.fakes.links import answer_calls, refuse_calls
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import (
    MessageTooLargeError,
    NoReplicaError,
    OmniError,
    QueryOfDeathError,
    RequestLostError,
    RequestRefusedError,
    StageInputError,
)
from vllm_omni_plugin.integration.rust_front_end.front_end_link import FrontEndLink
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import AbortedElsewhere
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ReplicaJoined, ReplicaLeft, RequestFailed

from .played import READY, PlayedFrontEnd, RustFleet


async def test_an_abort_ends_the_work_of_its_request_only(fleet: RustFleet, front_end: PlayedFrontEnd) -> None:
    for name in ("a-1", "b-1"):
        await front_end.add(name)
    await fleet.has("a-1", "b-1")
    (link, engine_id), (other, _) = fleet.run_of("a-1"), fleet.run_of("b-1")
    await front_end.abort("a-1", "unknown")
    await fleet.has("b-1")
    assert (link.aborted, other.aborted) == ([engine_id], [])
    fleet.say("b-1", 5)
    assert (await front_end.read_output()).request_id == "b-1"


async def test_a_request_moves_to_another_replica_unseen(fleet: RustFleet, front_end: PlayedFrontEnd) -> None:
    # The front end asks each engine for a watermark, and none has one.
    await front_end.add("a-1", sampling_params=SamplingParams(max_tokens=8, temperature=0.0, watermarking=True))
    await fleet.has("a-1")
    fleet.say("a-1", 5)
    first, _ = fleet.run_of("a-1")
    fleet.kill(0 if first is fleet.links[0] else 1)
    second, engine_id = fleet.run_of("a-1")
    assert second.requests[engine_id].prompt_token_ids == [1, 2, 3, 5]
    fleet.say("a-1", 6, finish=FinishReason.LENGTH)
    assert await answer(front_end) == ([5, 6], FinishReason.LENGTH)


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([b"\x00"], id="no payload"),
        pytest.param([b"\x00", b"\xc1"], id="no msgpack"),
        pytest.param([b"\x01", b"\x01"], id="no list"),
        pytest.param([b"\x03", b"\x91\x00"], id="no call"),
        pytest.param([b"\x02", b"\x90"], id="a wave"),
        pytest.param([b"\x63", b"\x90"], id="an unknown type"),
    ],
)
async def test_an_invalid_message_is_dropped(
    fleet: RustFleet, front_end: PlayedFrontEnd, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    await front_end.send_frames(*frames)
    await front_end.add("a-1")
    await fleet.has("a-1")
    assert "A message of vLLM's front end is dropped" in caplog.text


def rows(ids: Any = ((5, 6),), logprobs: Any = ((-1.0, -2.0),), ranks: Any = (1,), kind: str = "float32") -> Any:
    return LogprobsLists(np.array(ids), np.array(logprobs, dtype=kind), np.array(ranks))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("new_logprobs", rows(ids=[[]], logprobs=[[]])),
        ("new_logprobs", rows(logprobs=[[-1.0]])),
        ("new_logprobs", rows(ranks=[1, 1])),
        ("new_logprobs", rows(ids=[5, 6], logprobs=[-1.0, -2.0])),
        ("new_logprobs", rows(ids=[[5, -1]])),
        ("new_logprobs", rows(ranks=[-1])),
        ("new_logprobs", rows(kind="float64")),
        ("new_logprobs", rows(ids=[[5.0, 6.0]])),
        ("new_logprobs", rows()._replace(cu_num_generated_tokens=[0, 1])),
        (
            "new_prompt_logprobs_tensors",
            LogprobsTensors(
                torch.ones(1, 1, dtype=torch.int64),
                torch.ones(1, 1, dtype=torch.bfloat16),
                torch.ones(1, dtype=torch.int64),
            ),
        ),
        ("kv_transfer_params", {"a": [b"bytes"]}),
        ("ec_transfer_params", {"a": {1: 2}}),
    ],
)
# PyTorch says so once, of tensors in frames.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
async def test_an_output_that_the_front_end_cannot_read_fails_its_request_only(
    fleet: RustFleet, front_end: PlayedFrontEnd, field: str, value: Any
) -> None:
    for name in ("a-1", "b-1"):
        await front_end.add(name)
    await fleet.has("a-1", "b-1")
    (sender, _), (other, _) = fleet.run_of("a-1"), fleet.run_of("b-1")
    assert sender is not other
    fleet.say("a-1", 5, **{field: value})
    failed = await front_end.read_output()
    assert failed.error is not None
    assert (failed.request_id, failed.finish_reason, failed.error.code) == ("a-1", FinishReason.ERROR, "internal_error")
    await fleet.has("b-1")
    fleet.say("b-1", 6, new_logprobs=rows(), stop_reason=6, finish=FinishReason.STOP)
    good = await front_end.read_output()
    assert (good.request_id, good.new_token_ids, good.stop_reason) == ("b-1", [6], 6)


async def test_a_request_whose_parameters_vllm_refuses_is_answered_with_its_reason(
    fleet: RustFleet, front_end: PlayedFrontEnd
) -> None:
    wrong = SamplingParams()
    wrong.top_p = 3.0
    await front_end.add("a-1", sampling_params=wrong)
    refused = await front_end.read_output()
    assert refused.error is not None
    assert (refused.request_id, refused.error.code) == ("a-1", "validation_error")
    assert "top_p must be in (0, 1]" in refused.error.message


async def test_rules_that_fail_fail_their_request_only(fleet: RustFleet, front_end: PlayedFrontEnd) -> None:
    def fail(request: Any) -> None:
        raise KeyError(request.request_id)

    fleet.read_terms = fail
    await front_end.add("a-1")
    failed = await front_end.read_output()
    assert (failed.request_id, failed.finish_reason, failed.error and failed.error.retryable) == (
        "a-1",
        FinishReason.ERROR,
        False,
    )
    fleet.read_terms = lambda request: None
    await front_end.add("b-1")
    await fleet.has("b-1")


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (NoReplicaError("none"), "unavailable", True),
        (RequestRefusedError(503, "queue", "full", 1), "unavailable", True),
        (RequestLostError("lost"), "unavailable", True),
        (QueryOfDeathError("deadly"), "internal_error", False),
        (StageInputError("wrong"), "validation_error", False),
        (MessageTooLargeError("large"), "validation_error", False),
        (OmniError("broken"), "internal_error", False),
    ],
)
async def test_a_failed_request_says_why(
    fleet: RustFleet, front_end: PlayedFrontEnd, error: Exception, code: str, retryable: bool
) -> None:
    fleet.link.give(RequestFailed("a-1", error))
    output = await front_end.read_output()
    assert (output.request_id, output.new_token_ids, output.finish_reason) == ("a-1", [], FinishReason.ERROR)
    assert output.error == RequestError(code, str(error), retryable)


async def test_a_call_that_fails_is_answered_with_the_reason(fleet: RustFleet, front_end: PlayedFrontEnd) -> None:
    fleet.answer_with(refuse_calls)
    await front_end.call(1, "reset_prefix_cache", False, False)
    failed = (await front_end.read()).utility_output
    assert (failed.call_id, failed.result) == (1, None)
    assert failed.failure_message == "memory://replica-0/in refuses reset_prefix_cache"
    await front_end.call(2, "execute_dummy_batch")
    unknown = (await front_end.read()).utility_output
    assert unknown.call_id == 2
    assert "'execute_dummy_batch'" in unknown.failure_message


async def test_requests_are_served_while_a_call_is_open(fleet: RustFleet, front_end: PlayedFrontEnd) -> None:
    await front_end.call(1, "sleep", 1, "abort")
    await eventually(lambda: fleet.links[0].calls, "the call")
    await front_end.add("a-1")
    await fleet.has("a-1")
    fleet.say("a-1", 5)
    assert (await front_end.read_output()).new_token_ids == [5]
    for link in fleet.links.values():
        link.answer(link.calls[0][0])
    assert (await front_end.read()).utility_output.call_id == 1


async def test_operators_of_other_heads_abort_by_the_ids_of_clients(
    fleet: RustFleet, front_end: PlayedFrontEnd
) -> None:
    for name in ("a-1", "b-1", "c-1"):
        await front_end.add(name)
    await fleet.has("a-1", "b-1", "c-1")
    for client_ids, aborted in (("a", "unknown"), {"a-1"}), ((), {"b-1", "c-1"}):
        fleet.link.give(AbortedElsewhere(client_ids, applied := Future[None]()))
        ended = (await front_end.read()).outputs
        assert {output.request_id for output in ended} == aborted
        assert {output.finish_reason for output in ended} == {FinishReason.ABORT}
        assert applied.done()
    await fleet.has()
    # The next message is not an empty one, which the front end does not survive.
    fleet.link.give(AbortedElsewhere((), Future()))
    fleet.link.give(RequestFailed("last", OmniError("")))
    assert (await front_end.read_output()).request_id == "last"


async def test_only_a_replica_that_can_answer_prompts_is_the_first(fleet: RustFleet) -> None:
    first = fleet.link.first_ready_response
    fleet.link.give(ReplicaJoined(1, 0, b"another stage"))
    assert not first.done()
    fleet.link.give(ReplicaJoined(0, 2, READY))
    fleet.link.give(ReplicaJoined(0, 3, b"later"))
    fleet.link.give(ReplicaLeft(0, 2))
    assert first.result() == READY
    assert [type(change) for change in fleet.changes] == [ReplicaJoined, ReplicaJoined, ReplicaJoined, ReplicaLeft]


async def test_statistics_are_those_that_the_rules_return(fleet: RustFleet, front_end: PlayedFrontEnd) -> None:
    fleet.keep_statistics = lambda report: replace(report, num_running_reqs=10 + report.num_running_reqs)
    await front_end.add("a-1")
    await fleet.has("a-1")
    link, _ = fleet.run_of("a-1")
    link.say_outputs(scheduler_stats=SchedulerStats(num_running_reqs=3))
    message = await front_end.read()
    assert (message.engine_index, message.scheduler_stats.num_running_reqs) == (0, 13)
    assert [fleet.links[index] for index, _ in fleet.reports] == [link]


async def test_reports_of_a_replica_that_leaves_are_handled_before(fleet: RustFleet) -> None:
    fleet.links[1].say_outputs(scheduler_stats=SchedulerStats())
    reported = []
    fleet.on_change = lambda change: reported.append(len(fleet.reports))
    fleet.link.give(ReplicaLeft(0, 1))
    fleet.link.give(ReplicaJoined(0, 1, READY))
    assert reported == [1, 1]


async def test_statistics_that_cannot_be_kept_take_no_outputs_away(fleet: RustFleet, front_end: PlayedFrontEnd) -> None:
    def fail(report: Any) -> None:
        failed.set()
        raise ValueError("a report")

    failed = asyncio.Event()

    await front_end.add("a-1")
    await fleet.has("a-1")
    fleet.keep_statistics = fail
    link, engine_id = fleet.run_of("a-1")
    link.say_outputs(outputs=[EngineCoreOutput(engine_id, [5])], scheduler_stats=SchedulerStats())
    assert (await front_end.read_output()).new_token_ids == [5]
    await failed.wait()
    link.say_outputs(outputs=[EngineCoreOutput(engine_id, [6])])
    assert (await front_end.read_output()).new_token_ids == [6]
    assert [member.status for member in fleet.pool.members] == [ReplicaStatus.UP] * 2


@pytest.mark.parametrize("stops_by_itself", [True, False])
async def test_the_next_front_end_gets_nothing_of_the_former(
    fleet: RustFleet, front_end: PlayedFrontEnd, sockets: Path, stops_by_itself: bool
) -> None:
    await front_end.add("a-1")
    await front_end.call(1, "reset_prefix_cache", False, False)
    await fleet.has("a-1")
    await eventually(lambda: fleet.links[0].calls, "the call")
    link, engine_id = fleet.run_of("a-1")
    if stops_by_itself:
        fleet.link.disconnect()
        await fleet.has()
    async with PlayedFrontEnd(sockets) as second:
        fleet.link.connect(second.addresses, b"another")
        assert await second.greeted() == b"another"
        assert link.aborted == [engine_id]
        link.say_outputs(outputs=[EngineCoreOutput(engine_id, [5])])
        fleet.answer_with(answer_calls)
        for each in fleet.links.values():
            each.answer(each.calls[0][0], "late")
        # Its calls have the same numbers.
        await second.call(1, "is_sleeping")
        assert (await second.read()).utility_output.result.result == "is_sleeping"
        await second.add("b-1")
        await fleet.has("b-1")
        fleet.say("b-1", 7)
        assert (await second.read_output()).request_id == "b-1"


async def test_while_there_is_no_front_end_nothing_is_kept_for_it(fleet: RustFleet, sockets: Path) -> None:
    fleet.link.disconnect()
    fleet.links[0].say_outputs(scheduler_stats=SchedulerStats())
    fleet.link.give(RequestFailed("a-1", OmniError("")))
    async with PlayedFrontEnd(sockets) as front_end:
        fleet.link.connect(front_end.addresses, READY)
        await front_end.greeted()
        await front_end.add("b-1")
        await fleet.has("b-1")
        fleet.say("b-1", 7)
        assert (await front_end.read_output()).request_id == "b-1"


async def test_another_thread_ends_it(fleet: RustFleet, front_end: PlayedFrontEnd, sockets: Path) -> None:
    await front_end.add("a-1")
    await fleet.has("a-1")
    await asyncio.to_thread(fleet.link.close)
    await asyncio.wait_for(asyncio.wrap_future(fleet.link.ended), 10)
    await fleet.has()
    for late in (fleet.link.close, fleet.link.disconnect, lambda: fleet.link.connect(front_end.addresses, READY)):
        late()
    fleet.link.give(RequestFailed("b-1", OmniError("")))
    async with PlayedFrontEnd(sockets) as second:
        fleet.link.connect(second.addresses, READY)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.greeted(), 0.05)


async def test_it_may_be_closed_before_it_serves(fleet: RustFleet) -> None:
    link = FrontEndLink()
    link.close()
    async with asyncio.timeout(10):
        await link.serve(lambda message: None)
    assert link.ended.done()


async def answer(front_end: PlayedFrontEnd) -> tuple[list[int], Any]:
    """The tokens of the only request, and its finish reason."""
    tokens: list[int] = []
    while True:
        for output in (await front_end.read()).outputs:
            tokens += output.new_token_ids
            if output.finish_reason is not None:
                return tokens, output.finish_reason
