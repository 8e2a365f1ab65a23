"""The pipeline's fields of a request body, and the messages for mistakes."""

from typing import Any

import pytest

from tests.pipeline.files import SPEECH
from vllm_omni_plugin.admin.answers.call_options import BadOptionError, CallOptions, read_call_options
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage, load_pipeline

TEXT, AUDIO, SCORES = Modality.TEXT, Modality.AUDIO, Modality.SCORES


@pytest.fixture(scope="module")
def speech() -> Pipeline:
    return load_pipeline(SPEECH)


def pipeline(*outputs: Modality) -> Pipeline:
    """A writer, followed by a final stage for each output, with the output's name."""
    writer = Stage(0, "writer", "vllm", TEXT, model="m", final=TEXT in outputs)
    rest = [output for output in outputs if output is not TEXT]
    readers = [
        Stage(number, output.value, "a.b:C", output, inputs=("writer",), final=True)
        for number, output in enumerate(rest, 1)
    ]
    return Pipeline((writer, *readers))


def test_all_fields_are_read(speech: Pipeline) -> None:
    fields = {
        "modalities": ["audio", "text", "audio"],
        "audio": {"voice": "ann", "format": "pcm16"},
        "omni": {
            "outputs": ["talker"],
            "sampling": {"talker": {"temperature": 0}},
            "params": {"pace": 2},
            "timings": True,
        },
    }
    assert read_call_options(fields, speech) == CallOptions(
        modalities=(TEXT, AUDIO),
        audio_format="pcm16",
        outputs=frozenset({"talker"}),
        sampling={"talker": {"temperature": 0}},
        params={"pace": 2, "voice": "ann"},
        timings=True,
    )


def test_the_voice_in_params_has_precedence(speech: Pipeline) -> None:
    fields = {"modalities": ["audio"], "audio": {"voice": "ann"}, "omni": {"params": {"voice": "bob"}}}
    assert read_call_options(fields, speech).params == {"voice": "bob"}


def test_parameters_of_an_upstream_stage_may_be_given(speech: Pipeline) -> None:
    options = read_call_options({"modalities": ["audio"], "omni": {"sampling": {"thinker": {"seed": 1}}}}, speech)
    assert options.sampling == {"thinker": {"seed": 1}}


ASK_AUDIO = {"modalities": ["audio"]}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"modalities": ["smell"]}, "modalities", ": there is no modality 'smell': use one of text, audio."),
    (
        {"modalities": ["txt"]},
        "modalities",
        ": there is no modality 'txt' (did you mean 'text'?): use one of text, audio.",
    ),
    (
        {"modalities": []},
        "modalities",
        " asks for no output that this route can return: the pipeline has text, audio.",
    ),
    ({"modalities": "audio"}, "modalities", " must be a list of names."),
    ({"modalities": [1]}, "modalities", " must be a list of names."),
    ({"audio": {"voice": "ann"}}, "audio", " is given, but `modalities` does not ask for audio."),
    (ASK_AUDIO | {"audio": "ann"}, "audio", " must be an object."),
    (ASK_AUDIO | {"audio": {"voice": {"id": 1}}}, "audio.voice", " must be a string."),
    (ASK_AUDIO | {"audio": {"format": "mp3"}}, "audio.format", ": there is no format 'mp3': use one of wav, pcm16."),
    (ASK_AUDIO | {"audio": {"pitch": 1}}, "audio", ": there is no key 'pitch': use one of voice, format."),
    ({"omni": []}, "omni", " must be an object."),
    (
        {"omni": {"output": []}},
        "omni",
        ": there is no key 'output' (did you mean 'outputs'?): use one of outputs, params,",
    ),
    ({"omni": {"outputs": ["talker"]}}, "omni.outputs", ": no stage 'talker' runs for this request (did you mean "),
    ({"omni": {"outputs": "thinker"}}, "omni.outputs", " must be a list of names."),
    (
        ASK_AUDIO | {"omni": {"sampling": {"talkr": {}}}},
        "omni.sampling",
        ": no stage 'talkr' runs for this request (did you mean 'talker'?): use one of thinker, talker, vocoder.",
    ),
    ({"omni": {"sampling": {"thinker": 1}}}, "omni.sampling.thinker", " must be an object."),
    ({"omni": {"params": 1}}, "omni.params", " must be an object."),
    ({"omni": {"timings": "yes"}}, "omni.timings", " must be true or false."),
]


@pytest.mark.parametrize(("fields", "param", "fault"), BAD, ids=str)
def test_a_mistake_is_reported_with_its_field(speech: Pipeline, fields: dict[str, Any], param: str, fault: str) -> None:
    with pytest.raises(BadOptionError) as raised:
        read_call_options(fields, speech)
    assert raised.value.param == param
    assert str(raised.value).startswith(f"`{param}`{fault}")


@pytest.mark.parametrize(
    ("outputs", "asked", "message"),
    [
        (
            (TEXT, SCORES),
            ["scores"],
            "`modalities` asks for no output that this route can return: the pipeline has text, scores.",
        ),
        ((AUDIO, SCORES), ["audio", "scores"], "'scores' can only accompany 'text': ask for both."),
        ((TEXT, Modality.IMAGE), ["text", "image"], "'image' cannot be sent in an answer."),
    ],
)
def test_modalities_that_no_answer_can_hold_are_refused(
    outputs: tuple[Modality, ...], asked: list[str], message: str
) -> None:
    with pytest.raises(BadOptionError) as raised:
        read_call_options({"modalities": asked}, pipeline(*outputs))
    assert (raised.value.param, str(raised.value)) == ("modalities", message)


def test_a_stage_output_that_json_cannot_hold_is_refused() -> None:
    painter = Stage(0, "painter", "vllm", Modality.LATENT, model="m")
    writer = Stage(1, "writer", "a.b:C", TEXT, inputs=("painter",), transform="a.b:c", final=True)
    with pytest.raises(BadOptionError, match="Stage 'painter' has the output 'latent', which cannot be sent"):
        read_call_options({"omni": {"outputs": ["painter"]}}, Pipeline((painter, writer)))


def gated(*stages: Stage) -> Pipeline:
    return Pipeline((*stages, Stage(len(stages), "gate", "a.b:C", TEXT, inputs=("writer",), final=True)))


PREFILL = Stage(0, "prefill", "vllm", Modality.KV_CACHE, model="m")
GATED = gated(Stage(0, "writer", "vllm", TEXT, model="m"))
PREFILLED = gated(PREFILL, Stage(1, "writer", "vllm", TEXT, model="m", inputs=("prefill",)))


@pytest.mark.parametrize(
    ("pipeline", "stage", "fault"),
    [
        (load_pipeline(SPEECH), "thinker", "uses the request's own sampling parameters: set them there."),
        pytest.param(GATED, "writer", "uses the request's own", id="the entry stage, if a Python stage answers"),
        pytest.param(PREFILLED, "writer", "uses the request's own", id="the writer after a prefill stage"),
        pytest.param(PREFILLED, "prefill", "only fills a KV cache", id="a stage that samples nothing"),
    ],
)
def test_parameters_for_other_stages_are_refused(pipeline: Pipeline, stage: str, fault: str) -> None:
    with pytest.raises(BadOptionError, match=f"Stage '{stage}' {fault}") as raised:
        read_call_options({"omni": {"sampling": {stage: {"seed": 1}}}}, pipeline)
    assert raised.value.param == f"omni.sampling.{stage}"


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_clients_cannot_set_kv_transfer_parameters(speech: Pipeline, name: str) -> None:
    extra = {"extra_args": {name: {"remote_host": "10.0.0.1"}}}
    with pytest.raises(BadOptionError, match=f"`{name}` are set by the pipeline") as raised:
        read_call_options({"modalities": ["audio"], "omni": {"sampling": {"talker": extra}}}, speech)
    assert raised.value.param == "omni.sampling.talker"
