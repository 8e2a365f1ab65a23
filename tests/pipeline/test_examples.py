"""The example pipelines without any engine: valid files, and correct transforms and stages."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from vllm_omni_plugin.pipeline import StageInput, StageOutput, Transfer, load_pipeline
from vllm_omni_plugin.stages import StageJob

EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"
FILES = sorted(EXAMPLES.glob("*.yaml"))
CODES, FIRST_CODE, HOP = 128, 257, 480


@pytest.fixture(autouse=True)
def examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As `serve.py` has it; other tests have no package `stages`."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in {"stages", "tiny_models"}]:
        del sys.modules[name]


@pytest.fixture
def vocoder() -> ModuleType:
    return import_module("stages.vocoder")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_is_valid_and_names_the_models_made_for_it(file: Path) -> None:
    pipeline = load_pipeline(file)
    made = import_module("tiny_models").KINDS[file.stem]
    assert {stage.model for stage in pipeline.stages if stage.is_vllm} == {f"./{name}" for name in made}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_function_and_class_of_a_file_exists(file: Path) -> None:
    for stage in load_pipeline(file).stages:
        for name in (stage.engine, stage.transform or ""):
            module, colon, attribute = name.partition(":")
            assert not colon or callable(getattr(import_module(module), attribute))


def test_the_stages_that_transfer_a_cache_through_files_compute_each_prompt_in_one_part() -> None:
    for stage in load_pipeline(EXAMPLES / "prefill_decode.yaml").stages:
        arguments = {name.replace("-", "_"): value for name, value in stage.engine_args.items()}
        assert arguments["enable_chunked_prefill"] is False
        assert arguments["max_num_batched_tokens"] >= arguments["max_model_len"]


def test_the_speech_file_knows_the_vocabulary_of_the_talker() -> None:
    vocoder = load_pipeline(EXAMPLES / "speech.yaml").stages[2]
    models = import_module("tiny_models")
    assert vocoder.options == {"first_code": models.FIRST_CODE, "codes": models.CODES}


@pytest.mark.parametrize("chunk", [1, 16, 33])
def test_chunks_sound_as_the_whole_does(vocoder: ModuleType, chunk: int) -> None:
    stage = vocoder.Vocoder(first_code=FIRST_CODE, codes=CODES, device="cpu")
    stage.start()
    codes = [FIRST_CODE + 7 * number % CODES for number in range(100)]
    (whole,) = stage.compute([StageJob(StageInput(token_ids=codes))])
    memory: dict[str, object] = {}
    heard: list[float] = []
    for start in range(0, len(codes), chunk):
        given = StageInput(token_ids=codes[start : start + chunk])
        (part,) = stage.compute([StageJob(given, memory, last=start + chunk >= len(codes))])
        heard += part.tensor.tolist()
    assert heard == whole.tensor.tolist()
    assert len(heard) == (len(codes) + 1) * HOP
    assert 0.1 < max(map(abs, heard)) < 1.0


def test_a_session_that_ends_without_a_chunk_fades_out(vocoder: ModuleType) -> None:
    stage = vocoder.Vocoder(first_code=FIRST_CODE, codes=CODES, device="cpu")
    stage.start()
    codes = [FIRST_CODE, FIRST_CODE + 1]
    memory: dict[str, object] = {}
    (sound,) = stage.compute([StageJob(StageInput(token_ids=codes), memory, last=False)])
    (end,) = stage.compute([StageJob(StageInput(), memory)])
    (whole,) = stage.compute([StageJob(StageInput(token_ids=codes))])
    assert [*sound.tensor.tolist(), *end.tensor.tolist()] == whole.tensor.tolist()


@pytest.mark.parametrize("token", [FIRST_CODE - 1, FIRST_CODE + CODES])
def test_a_token_of_text_is_an_error_of_its_request_alone(vocoder: ModuleType, token: int) -> None:
    stage = vocoder.Vocoder(first_code=FIRST_CODE, codes=CODES, device="cpu")
    stage.start()
    wrong, right = stage.compute([StageJob(StageInput(token_ids=[tokens])) for tokens in (token, FIRST_CODE)])
    assert str(wrong) == f"[{token}] are not all codec tokens"
    assert right.tensor.shape == (2 * HOP,)


@pytest.mark.parametrize(("unsafe", "said"), [(0.49, "An answer."), (0.5, "No.")])
def test_the_gate_refuses_from_its_threshold_on(unsafe: float, said: str) -> None:
    gate = import_module("stages.gate").Gate(threshold=0.5, refusal="No.", device="cpu")
    given = StageInput(text="An answer.", metadata={"unsafe": unsafe})
    assert [output.text for output in gate.compute([StageJob(given)])] == [said]


def test_speech_has_room_for_each_token_of_its_text() -> None:
    handover = import_module("stages.handover")
    transfer = Transfer("request", "talker")
    given = handover.speak({"thinker": StageOutput(token_ids=[1, 2, 3], text="abc")}, transfer)
    assert (given.text, given.sampling) == ("abc", {"max_tokens": 3 * handover.CODES_PER_TOKEN})
    assert handover.speak({"thinker": StageOutput()}, transfer) is None
