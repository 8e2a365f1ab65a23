"""The API of Python stages for the orchestrator."""

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from tests.stages.classes import Priced
from tests.stages.heads import END_TOKEN, api, source, stage
from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.pipeline import StageInput, StageOutput
from vllm_omni_plugin.pipeline.transfer import WHOLE, InputPart
from vllm_omni_plugin.stages.stage_process import python_fingerprint
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import StageRequest
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move

API = api(stage(sampling={"voice": "low", "speed": 1, "pitch": 1}))


def build(given: StageInput, sampling: dict[str, Any] | None = None, part: InputPart = WHOLE) -> StageRequest:
    return API.build(source(), given, sampling or {}, for_client=False, part=part)


def output(**fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput("a", fields.pop("new_token_ids", [0]), **fields)


def content(**fields: Any) -> dict[str, Any]:
    return {"omni": fields}


def test_sampling_of_the_request_overrides_the_transform_which_overrides_the_stage() -> None:
    request = build(StageInput(text="x", sampling={"speed": 2, "pitch": 2}), {"pitch": 3})
    assert request.sampling == {"voice": "low", "speed": 2, "pitch": 3}


def test_a_chunk_says_whether_more_may_come() -> None:
    request = build(StageInput((1, 2)), part=InputPart(resumable=True, last=False))
    assert (request.token_ids, request.resumable, request.last, request.closing) == ([1, 2], True, False, False)
    end = API.build_end(source())
    assert (end.request_id, end.resumable, end.closing) == ("a", False, True)


@pytest.mark.parametrize(
    "given",
    [
        StageInput(metadata={"a": object()}),
        StageInput(text="a", metadata={1: "b"}),  # type: ignore[dict-item]
        StageInput(text="a", sampling={1: 2}),  # type: ignore[dict-item]
        StageInput(text="\ud800"),
        StageInput(token_ids=[2**70]),
        StageInput(tensor=[1.0]),
        StageInput(tensor=torch.ones(3, device="meta")),
    ],
)
def test_an_input_that_cannot_be_sent_is_an_error_of_its_request(given: StageInput) -> None:
    with pytest.raises(StageInputError, match="Stage 'vocoder': its input cannot be sent: "):
        build(given)


def test_a_first_stage_gets_the_prompt_as_tokens_and_text_or_as_embeddings() -> None:
    client = source(prompt_token_ids=[104, 105], prompt_embeds=None, resumable=False)
    request = API.build_root(client, {"speed": 3}, for_client=True)
    assert (request.token_ids, request.text, request.sampling["speed"]) == ([104, 105], "hi", 3)
    client = source(prompt_token_ids=None, prompt_embeds=torch.ones(3, 4), resumable=False)
    request = API.build_root(client, {}, for_client=False)
    assert (request.token_ids, request.text, request.tensor.shape) == (None, "", (3, 4))


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (StageInput(token_ids=[1, 2, 3]), 3),
        (StageInput(text="four"), 4),
        (StageInput(tensor=torch.ones(5, 2)), 5),
        (StageInput(tensor=torch.tensor(1.0)), 1),
        (StageInput(metadata={"a": 1}), 1),
    ],
)
def test_the_default_cost_is_the_size_of_the_input(given: StageInput, size: int) -> None:
    task, _ = API.describe(build(given))
    assert (task["prompt"].token_ids, task["prompt"].cacheable, task["max_tokens"]) == (range(size), False, 1)


class Fatal:
    def __int__(self) -> int:
        raise SystemExit

    def __str__(self) -> str:
        return "SystemExit"


@pytest.mark.parametrize("cost", [None, -1, float("nan"), float("inf"), "much", 2**70, Fatal()], ids=str)
def test_an_invalid_cost_is_replaced_by_the_size_with_one_warning(cost: Any, caplog: pytest.LogCaptureFixture) -> None:
    priced = api(stage("classes:Priced"), Priced.cost)
    request = priced.build(source(), StageInput(text="four"), {}, for_client=False)
    request.metadata = {} if cost is None else {"cost": cost}
    for _ in range(2):
        assert len(priced.describe(request)[0]["prompt"].token_ids) == 4
    (said,) = caplog.messages
    assert "tests.stages.classes:Priced.cost failed: " in said
    request.metadata = {"cost": 7.9}
    assert len(priced.describe(request)[0]["prompt"].token_ids) == 7


def test_a_request_whose_replica_is_lost_starts_again_from_its_whole_input() -> None:
    request = build(StageInput((1, 2), metadata={"a": 1}))
    movable = API.make_movable(request)
    assert API.how_to_move(movable) is Move.REPLAY
    assert API.continuation(movable, Move.REPLAY, [0, 1]) == request


def test_a_repeated_output_is_empty() -> None:
    again = output(pooling_output=torch.ones(2), kv_transfer_params=content(text="x"), finish_reason=FinishReason.STOP)
    API.trim_repeated(again, 1)
    read = API.reader(None).read(again, ended=True)
    assert (again.new_token_ids, read.text, read.tensor, read.finish_reason) == ([], "", None, "stop")
    new = output(new_token_ids=[1], kv_transfer_params=content(text="x"))
    API.trim_repeated(new, 0)
    assert (new.new_token_ids, API.reader(None).read(new, ended=False).text) == ([1], "x")


def test_outputs_are_read_one_by_one_and_as_a_whole() -> None:
    reader = API.reader(None)
    assert reader.whole == StageOutput()
    first = output(
        pooling_output=torch.ones(2), kv_transfer_params=content(text="a", token_ids=[7], metadata={"sample_rate": 1})
    )
    read = reader.read(first, ended=False)
    assert (read.text, read.token_ids, read.tensor.tolist(), read.finish_reason) == ("a", [7], [1.0, 1.0], None)
    reader.read(
        output(
            pooling_output=torch.zeros(1),
            kv_transfer_params=content(text="b", metadata={"end": True}),
            finish_reason=FinishReason.STOP,
        ),
        ended=True,
    )
    whole = reader.whole
    assert (whole.text, whole.token_ids, whole.tensor.tolist()) == ("ab", [7], [1.0, 1.0, 0.0])
    assert (whole.metadata, whole.finish_reason) == ({"sample_rate": 1, "end": True}, "stop")


@pytest.mark.parametrize("end", [None, FinishReason.STOP])
@pytest.mark.parametrize(
    ("read", "tokens"),
    [(StageOutput(text="hi"), [104, 105]), (StageOutput(text="hi", token_ids=[7]), [7]), (StageOutput(), [])],
)
def test_an_answer_to_the_client_has_tokens_and_an_end_token(
    read: StageOutput, tokens: list[int], end: FinishReason | None
) -> None:
    said = output(pooling_output=torch.ones(1), kv_transfer_params=content(), finish_reason=end)
    expected = tokens if end is None else [*tokens, END_TOKEN]
    assert API.answer(said, read) == output(new_token_ids=expected, finish_reason=end)
    assert said.new_token_ids == [0]


@pytest.mark.parametrize("asked", [{"logprobs": 0}, {"prompt_logprobs": 1}], ids=str)
def test_a_stage_that_answers_the_client_has_no_probabilities(asked: dict[str, int]) -> None:
    with pytest.raises(StageInputError, match="Stage 'vocoder': it is not a model and has no logprobs"):
        API.check_answerable(source(sampling_params=SamplingParams(**asked)))
    API.check_answerable(source(sampling_params=SamplingParams()))


def test_fingerprints_differ_with_class_and_options_and_not_with_the_order_of_options() -> None:
    one = python_fingerprint(stage(options={"a": 1, "b": {"x": 1, "y": 2}}))
    assert one == python_fingerprint(stage(options={"b": {"y": 2, "x": 1}, "a": 1}))
    other = python_fingerprint(stage(options={"a": 2}))
    assert [name for name in one if other[name] != one[name]] == ["options"]
    assert python_fingerprint(stage("other:Class"))["stage class"] != one["stage class"]
    assert (one["stage"], one["stage name"]) == ("1", "vocoder")
