"""What a request for some outputs needs of a pipeline."""

from collections.abc import Sequence

import pytest

from tests.fakes.pipeline_fleet import stage
from tests.fakes.pipelines import CHAIN, DISAGGREGATED, FAN_OUT, PYTHON, SPEECH
from vllm_omni_plugin.orchestrator.multi_stage.request_state import RequestPlan, plan_request
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall
from vllm_omni_plugin.pipeline import Pipeline, Stage

GUARDED = (stage(0, "writer", "text"), stage(1, "gate", "text", "writer", engine=PYTHON, final=True))
DISAGGREGATED_GUARDED = (
    DISAGGREGATED[0],
    stage(1, "decode", "text", "prefill", model="one", transform="kv_transfer"),
    stage(2, "gate", "text", "decode", engine=PYTHON, final=True),
)
VECTORS = (stage(0, "encoder", "embedding", final=True),)
PAINTER = (stage(0, "encoder", "embedding"), stage(1, "painter", "image", "encoder", engine=PYTHON, final=True))


def plan_of(stages: Sequence[Stage], modalities: Sequence[str] = (), outputs: Sequence[str] = ()) -> RequestPlan:
    """The plan of a plain request, or of a call that asks for these modalities."""
    call = PipelineCall(tuple(modalities), lambda event: None, frozenset(outputs)) if modalities else None
    return plan_request(Pipeline(tuple(stages)), call)


@pytest.mark.parametrize(
    ("stages", "modalities", "front", "finals", "sampled"),
    [
        pytest.param(CHAIN, [], 1, {1}, 1, id="plain: the last text"),
        pytest.param(CHAIN, ["text"], 1, {0, 1}, 1, id="a call: all texts"),
        pytest.param(SPEECH, [], 0, {0}, 0, id="plain speech pipeline: text"),
        pytest.param(SPEECH, ["text", "audio"], 0, {0, 2}, 0, id="text and speech"),
        pytest.param(SPEECH, ["audio"], None, {2}, None, id="speech alone"),
        pytest.param(FAN_OUT, ["text", "image"], 0, {0, 2}, 0, id="one branch"),
        pytest.param(FAN_OUT, ["scores", "image"], 1, {1, 2}, 1, id="scores answer, if there is no text"),
        pytest.param(VECTORS, [], 0, {0}, 0, id="plain: embeddings"),
        pytest.param(PAINTER, [], None, {1}, None, id="plain, and nothing that vLLM's server knows"),
        pytest.param(GUARDED, [], 1, {1}, 0, id="a Python stage answers, the entry samples"),
        pytest.param(DISAGGREGATED, [], 1, {1}, 1, id="the decode answers and samples"),
        pytest.param(DISAGGREGATED_GUARDED, [], 2, {2}, 1, id="a Python stage answers, the decode samples"),
    ],
)
def test_plans_have_the_answering_stage_the_finals_and_the_client_sampled_stage(
    stages: Sequence[Stage], modalities: list[str], front: int | None, finals: set[int], sampled: int | None
) -> None:
    plan = plan_of(stages, modalities)
    assert (plan.answer_stage, plan.finals, plan.client_sampled) == (front, finals, sampled)


@pytest.mark.parametrize(
    ("stages", "modalities", "outputs", "shown", "read"),
    [
        pytest.param(CHAIN, [], [], set(), {0}, id="plain: only what is handed on is read"),
        pytest.param(CHAIN, ["text"], [], {0}, {0}, id="the front answers another way"),
        pytest.param(CHAIN, ["text"], ["refiner"], {0, 1}, {0, 1}, id="unless it is asked for by name"),
        pytest.param(SPEECH, ["audio"], [], {2}, {0, 1, 2}, id="speech alone"),
        pytest.param(SPEECH, ["text"], ["vocoder"], set(), set(), id="a stage that does not run shows nothing"),
        pytest.param(DISAGGREGATED, [], [], set(), set(), id="nobody reads a KV cache"),
        pytest.param(GUARDED, [], [], set(), {0, 1}, id="a Python stage in front is read to answer"),
    ],
)
def test_plans_have_the_readable_and_the_shown_stages(
    stages: Sequence[Stage], modalities: list[str], outputs: list[str], shown: set[int], read: set[int]
) -> None:
    plan = plan_of(stages, modalities, outputs)
    assert plan.shown == shown
    assert plan.readable == read
