"""The client's sampling parameters at a stage whose model did not read the prompt."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.pipeline import Modality, StageInput
from vllm_omni_plugin.pipeline.transfer import InputPart

from .stage_models import CONTEXT, REVERSED, WORDS, api, config, model, source

GIVEN = StageInput(text="red blue")
PROMPT = [1, 3, 4]


def ending(folder: Path, *ends: int) -> Path:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}))
    return folder


@pytest.fixture(scope="module")
def entry(folder: Path) -> Any:
    """A model that ends at `<end>` and at `black`, id 7."""
    return config(ending(model(folder / "entry"), 0, 7))


@pytest.fixture(scope="module")
def cousin(folder: Path) -> Any:
    """Another model with the same tokenizer, which ends at `<end>` and at `stop`, id 8."""
    return config(ending(model(folder / "cousin"), 0, 8))


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Any:
    """A model with the same words under other ids; `<end>` is `green`, 7."""
    (folder / "stranger").mkdir()
    words = list(REVERSED)
    words[0], words[7] = words[7], words[0]
    return config(ending(model(folder / "stranger", words), 7))


@pytest.fixture(scope="module")
def asked(entry: Any) -> Callable[..., Any]:
    """Makes a client's request, processed by the entry stage's vLLM."""
    processor = InputProcessor(entry)

    def ask(**params: Any) -> Any:
        prompt: Any = {"type": "token", "prompt_token_ids": PROMPT}
        request = processor.process_inputs("r-1", prompt, SamplingParams(**{"max_tokens": 5, **params}), ("generate",))
        request.external_req_id = "r"
        return request

    return ask


def test_the_answer_ends_where_the_answering_model_ends(
    asked: Callable[..., Any], entry: Any, cousin: Any, stranger: Any
) -> None:
    at_home = api(cousin, entry).build(asked(), GIVEN, {}, for_client=True).sampling_params
    assert (at_home.eos_token_id, at_home.stop_token_ids, at_home.all_stop_token_ids) == (0, [8], {0, 8})
    abroad = api(stranger, entry).build(asked(), GIVEN, {}, for_client=True).sampling_params
    assert (abroad.eos_token_id, abroad.stop_token_ids, abroad.all_stop_token_ids) == (7, [], {7})


def test_stop_token_ids_of_the_client_apply_only_in_the_same_vocabulary(
    asked: Callable[..., Any], entry: Any, cousin: Any, stranger: Any
) -> None:
    client = asked(stop_token_ids=[5])
    for own, stops in ((cousin, [5, 8]), (stranger, [])):
        front = api(own, entry).build(client, GIVEN, {}, for_client=True).sampling_params
        assert sorted(front.stop_token_ids) == stops
    # The client's own request is as it was.
    assert sorted(client.sampling_params.stop_token_ids) == [5, 7]


def test_bad_words_are_tokenized_again(asked: Callable[..., Any], entry: Any, stranger: Any) -> None:
    client = asked(bad_words=["red"])
    front = api(stranger, entry).build(client, GIVEN, {}, for_client=True).sampling_params
    assert client.sampling_params.bad_words_token_ids == [[WORDS.index("red")]]
    assert front.bad_words_token_ids == [[REVERSED.index("red")]]


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {5: 1.0}}, {"allowed_token_ids": [5]}, {"logprob_token_ids": [5]}, {"prompt_logprobs": 1}],
    ids=lambda params: next(iter(params)),
)
def test_parameters_with_token_ids_of_another_model_are_refused(
    asked: Callable[..., Any], entry: Any, stranger: Any, params: dict[str, Any]
) -> None:
    with pytest.raises(StageInputError) as raised:
        api(stranger, entry).build(asked(**params), GIVEN, {}, for_client=True)
    name = next(iter(params))
    assert str(raised.value) == f"Stage 'refiner': {name!r} refers to tokens of the model that reads the prompt"


def test_parameters_with_token_ids_apply_in_the_same_vocabulary(
    asked: Callable[..., Any], entry: Any, cousin: Any
) -> None:
    front = api(cousin, entry).build(asked(logit_bias={5: 1.0}), GIVEN, {}, for_client=True)
    assert front.sampling_params.logit_bias == {5: 1.0}
    with pytest.raises(StageInputError, match="'prompt_logprobs' refers to tokens"):
        api(cousin, entry).build(asked(prompt_logprobs=1), GIVEN, {}, for_client=True)


def test_a_structured_answer_is_for_the_stages_own_backend(
    asked: Callable[..., Any], entry: Any, stranger: Any, folder: Path
) -> None:
    client = asked(structured_outputs=StructuredOutputsParams(regex="red|blue"))
    other = config(folder / "stranger", structured_outputs_config={"backend": "guidance"})
    for own in (stranger, other):
        front = api(own, entry).build(client, GIVEN, {}, for_client=True).sampling_params
        assert front.structured_outputs.regex == "red|blue"
        assert front.structured_outputs is not client.sampling_params.structured_outputs


def test_the_parameters_of_the_client_are_not_changed(
    asked: Callable[..., Any], entry: Any, cousin: Any, stranger: Any
) -> None:
    request = asked(bad_words=["red"], stop_token_ids=[4], structured_outputs=StructuredOutputsParams(json="{}"))
    before = copy.deepcopy(request.sampling_params)
    for stage in (cousin, stranger):
        api(stage, entry).build(request, GIVEN, {"temperature": 0.5, "stop_token_ids": [5]}, for_client=True)
    assert request.sampling_params == before


def test_parameters_of_a_transform_override_those_of_the_client(
    asked: Callable[..., Any], entry: Any, stranger: Any
) -> None:
    given = StageInput(text="red", sampling={"max_tokens": 2, "temperature": 0.0})
    front = api(stranger, entry).build(asked(top_p=0.5), given, {}, for_client=True).sampling_params
    # Greedy sampling has no top_p.
    assert (front.max_tokens, front.temperature, front.top_p) == (2, 0.0, 1.0)


def test_a_request_without_a_limit_may_fill_the_context_of_the_answering_model(
    asked: Callable[..., Any], entry: Any, stranger: Any, folder: Path
) -> None:
    unlimited = asked(max_tokens=CONTEXT - len(PROMPT))
    wide = config(folder / "stranger", max_model_len=64)
    assert api(wide, entry).build(unlimited, GIVEN, {}, for_client=True).sampling_params.max_tokens == 64 - 3
    limited = api(stranger, entry).build(asked(max_tokens=28), StageInput(token_ids=[3] * 20), {}, for_client=True)
    assert limited.sampling_params.max_tokens == 12


def test_max_tokens_of_the_file_limits_each_chunk(asked: Callable[..., Any], entry: Any, stranger: Any) -> None:
    stage_api = api(stranger, entry, sampling={"max_tokens": 4}, inputs=("thinker",), async_chunk=True)
    part = InputPart(resumable=True, last=False)
    turns = [
        stage_api.build(asked(max_tokens=limit), GIVEN, {}, for_client=True, part=part).sampling_params
        for limit in (3, 9)
    ]
    assert [params.max_tokens for params in turns] == [3, 4]


def test_a_request_for_another_kind_of_answer_is_refused(entry: Any, cousin: Any, folder: Path) -> None:
    scoring = api(config(folder / "cousin", runner="pooling", convert="classify"), entry, output=Modality.SCORES)
    with pytest.raises(StageInputError) as raised:
        scoring.build(source(), GIVEN, {}, for_client=True)
    assert str(raised.value) == "Stage 'refiner': it scores or embeds, which is not what the request asks for"
    with pytest.raises(StageInputError, match="it scores or embeds"):
        scoring.build(source(params=PoolingParams(task="embed")), GIVEN, {}, for_client=True)
    with pytest.raises(StageInputError, match="'refiner': it generates"):
        api(cousin, entry).build(source(params=PoolingParams(task="embed")), GIVEN, {}, for_client=True)
    classify = source(params=PoolingParams(task="classify", use_activation=False))
    request = scoring.build(classify, GIVEN, {}, for_client=True)
    assert request.pooling_params.use_activation is False
