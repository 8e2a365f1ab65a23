"""Inputs of stages, made on threads."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeRequest
from tests.fakes.pipeline_fleet import stage
from tests.fakes.pipelines import CHAIN, FAN_OUT, SPEECH
from tests.fakes.stage_api import FakeStageApi
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.orchestrator.multi_stage.chunked_input import ChunkedInput, OutputChunk
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import DaemonThreads, StageInputBuilder
from vllm_omni_plugin.orchestrator.multi_stage.request_state import PipelineRequestState, plan_request
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall
from vllm_omni_plugin.pipeline import Pipeline, Stage, StageOutput


def builder_of(
    stages: tuple[Stage, ...], prompt_text: Callable[[Any], str] = lambda request: "hi"
) -> StageInputBuilder:
    return StageInputBuilder(Pipeline(stages), [FakeStageApi(each) for each in stages], prompt_text)


def state_of(stages: tuple[Stage, ...], *modalities: str, **params: Any) -> PipelineRequestState:
    call = PipelineCall(modalities, lambda event: None, params=params)
    plan = plan_request(Pipeline(stages), call)
    request = FakeRequest("r", prompt=[1, 2])
    ticket = cast(Any, None)
    return PipelineRequestState(request, ticket, call=call, plan=plan)


async def outcome(
    input_builder: StageInputBuilder, stage: Stage, work: Callable[[], Any], wanted: Callable[[], bool] = lambda: True
) -> Any:
    """What becomes of work; raises what it raises."""
    done: asyncio.Future[Callable[[], Any]] = asyncio.get_running_loop().create_future()
    input_builder.run_on_thread(stage, work, wanted, done.set_result)
    return (await done)()


@pytest.fixture
def input_builder() -> Any:
    input_builder = builder_of(CHAIN)
    yield input_builder
    input_builder.close()


def test_a_transform_that_does_not_exist_is_found_at_the_start() -> None:
    broken = (CHAIN[0], stage(1, "refiner", "text", "thinker", final=True, transform="tests.fakes.transforms:missing"))
    with pytest.raises(ConfigError, match="has no missing"):
        builder_of(broken)


def test_the_text_of_the_prompt_is_made_once_and_only_for_custom_transforms() -> None:
    made, seen = list[str](), list[str]()

    def prompt_text(request: Any) -> str:
        made.append(request.request_id)
        return "hi"

    built_in = (SPEECH[0], stage(1, "talker", "tokens", "thinker", transform="tokens", final=True, async_chunk=True))
    for stages, expected in ((SPEECH, ["r"]), (built_in, [])):
        made.clear()
        input_builder = builder_of(stages, prompt_text)
        state = state_of(stages, stages[-1].output, talker=lambda transfer: seen.append(transfer.prompt))
        for number in range(3):
            input_builder.build_chunk(
                state, stages[1], ChunkedInput(1), OutputChunk((StageOutput((1,)),), number, False)
            )
        input_builder.close()
        assert made == expected
    assert seen == ["hi"] * 3


def test_a_prompt_whose_text_cannot_be_made_fails_where_it_is_needed() -> None:
    def prompt_text(request: Any) -> str:
        raise ValueError("no text")

    input_builder, state = builder_of(SPEECH, prompt_text), state_of(SPEECH, "audio", talker=lambda transfer: None)
    with pytest.raises(ValueError, match="no text"):
        input_builder.build_chunk(state, SPEECH[1], ChunkedInput(1), OutputChunk((StageOutput((1,)),), 0, False))
    input_builder.close()


def test_a_transform_knows_the_request_and_the_chunk() -> None:
    seen: list[Any] = []
    input_builder, state = builder_of(SPEECH), state_of(SPEECH, "audio", talker=seen.append, voice="alto")
    chunks = ChunkedInput(1)
    input_builder.build_chunk(state, SPEECH[1], chunks, OutputChunk((StageOutput((1,)), StageOutput((2,))), 3, True))
    input_builder.close()
    (transfer,) = seen
    assert (transfer.request_id, transfer.stage, list(transfer.prompt_token_ids)) == ("r", "talker", [1, 2])
    assert (transfer.chunk, transfer.last, transfer.params["voice"]) == (3, True, "alto")
    assert transfer.memory is chunks.memory


def test_outputs_that_cannot_be_joined_fail_where_they_are_joined() -> None:
    """Not on the loop, where tensors of different shapes would stop every request."""
    input_builder, state = builder_of(FAN_OUT), state_of(FAN_OUT, "text", "image")

    class Broken:
        @property
        def whole(self) -> StageOutput:
            raise RuntimeError("shapes differ")

    state.readers[0] = Broken()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="shapes differ"):
        input_builder.build_whole(state, FAN_OUT[2])
    input_builder.close()


def test_work_that_ends_after_the_loop_is_ignored() -> None:
    gate, input_builder = threading.Event(), builder_of(CHAIN)

    async def begin() -> None:
        input_builder.run_on_thread(CHAIN[1], lambda: gate.wait(30), lambda: True, lambda outcome: None)

    asyncio.run(begin())
    input_builder.close()
    gate.set()
    for thread in named("omni-refiner"):
        thread.join(10)
    assert named("omni-refiner") == []


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


async def test_closing_drops_queued_calls_and_lets_running_calls_end() -> None:
    threads, begun, gate, done = DaemonThreads(1, "omni-test"), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        gate.wait(30)
        done.append("first")

    threads.submit(first)
    threads.submit(lambda: done.append("second"))
    assert begun.wait(30)
    threads.close()
    threads.close()
    threads.submit(lambda: done.append("third"))
    gate.set()
    await eventually(lambda: named("omni-test") == [])
    assert done == ["first"]


def test_a_call_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    script = (
        "import threading\n"
        "from vllm_omni_plugin.orchestrator.multi_stage.input_builder import DaemonThreads\n"
        "threads = DaemonThreads(1, 'omni-test')\n"
        "begun = threading.Event()\n"
        "threads.submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait(30)\n"
        "threads.close()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
