"""All requests of a fleet have one structured-output backend, whatever their schemas."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_omni_plugin.vllm_api.engine_messages import structured_outputs
from vllm_omni_plugin.vllm_api.engine_messages.structured_outputs import fix_backend

from .stage_models import config, model

PLAIN = {"type": "object", "properties": {"a": {"type": "integer"}}}
NOT_FOR_XGRAMMAR = {"type": "integer", "multipleOf": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("structured") / "model")


def backend_of(vllm_config: Any, schema: dict[str, Any]) -> Any:
    """The backend that an engine would use first for this schema."""
    params = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(json=schema))
    prompt: Any = {"type": "token", "prompt_token_ids": [1, 2]}
    request = InputProcessor(vllm_config).process_inputs("r", prompt, params, ("generate",))
    return request.sampling_params.structured_outputs._backend


def test_vllm_chooses_the_backend_by_the_schema(folder: Path) -> None:
    # If it does not any more, `fix_backend` can go.
    made = config(folder)
    assert [backend_of(made, schema) for schema in (PLAIN, NOT_FOR_XGRAMMAR)] == ["xgrammar", "guidance"]


def test_a_schema_that_the_fleets_backend_cannot_do_is_refused_whatever_the_replica(folder: Path) -> None:
    made = config(folder)
    processor = InputProcessor(made)
    fix_backend(made)
    assert processor.structured_outputs_config is made.structured_outputs_config
    assert backend_of(made, PLAIN) == "xgrammar"
    with pytest.raises(VLLMValidationError, match="not supported by xgrammar"):
        backend_of(made, NOT_FOR_XGRAMMAR)


def test_a_backend_that_an_operator_has_chosen_stays(folder: Path) -> None:
    made = config(folder, structured_outputs_config={"backend": "guidance"})
    fix_backend(made)
    assert [backend_of(made, schema) for schema in (PLAIN, NOT_FOR_XGRAMMAR)] == ["guidance", "guidance"]


@pytest.mark.parametrize(("is_tekken", "backend"), [(True, "guidance"), (False, "xgrammar")])
def test_mistrals_tokenizers_get_the_backend_of_their_tool_calls(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_tekken: bool, backend: str
) -> None:
    monkeypatch.setattr(structured_outputs, "is_mistral_tokenizer", lambda tokenizer: True)
    tokenizer = SimpleNamespace(is_tekken=is_tekken)
    monkeypatch.setattr(structured_outputs, "cached_tokenizer_from_config", lambda model_config: tokenizer)
    made = config(folder)
    fix_backend(made)
    assert made.structured_outputs_config.backend == backend
