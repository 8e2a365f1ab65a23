"""OpenAI's `user` stands in for the session, in vLLM's own serving classes and behind all that vLLM looks at itself."""

import inspect
from typing import Any

import pytest
from starlette.requests import Request
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

from vllm_omni_plugin.integration.http.app import patch_session_id


def http_request(headers: dict[str, str]) -> Request:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set to what it is, so that it is set back to it afterwards.
    monkeypatch.setattr(
        GenerateBaseServing, "_get_session_id", inspect.getattr_static(GenerateBaseServing, "_get_session_id")
    )
    patch_session_id()


@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        pytest.param({"user": "ann"}, {}, "ann", id="user-alone"),
        pytest.param({"user": "ann", "session_id": "s1"}, {}, "s1", id="the-body's-session-first"),
        pytest.param({"user": "ann"}, {"X-Session-ID": "s2"}, "s2", id="the-header-first"),
        pytest.param({"user": "ann", "vllm_xargs": {"session_id": "s3"}}, {}, "s3", id="the-extra-argument-first"),
        pytest.param({"user": ""}, {}, None, id="an-empty-user-is-none"),
        pytest.param({}, {}, None, id="no-user"),
    ],
)
def test_user_is_the_session_of_a_request_that_names_none(fields: Any, headers: Any, expected: str | None) -> None:
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "Hello"}], **fields)
    assert GenerateBaseServing._get_session_id(request, http_request(headers)) == expected


@pytest.mark.parametrize(
    ("serving", "request_class"),
    [
        (OpenAIServingChat, ChatCompletionRequest),
        (OpenAIServingCompletion, CompletionRequest),
        (OpenAIServingResponses, ResponsesRequest),
    ],
)
def test_vllms_serving_class_calls_the_method_that_we_override(serving: Any, request_class: Any) -> None:
    assert "user" in request_class.model_fields
    assert "_get_session_id" not in vars(serving)
    assert "self._get_session_id(" in inspect.getsource(serving)
