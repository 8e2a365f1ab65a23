"""Calls of a pipeline that are refused while they wait: whatever is asked for, with the true status."""

from typing import Any

import pytest

from tests.contract.pipeline_http.app import Model, PipelineApp
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCallEnded
from vllm_omni_plugin.pipeline import Pipeline

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")

REFUSED = RequestRefusedError(503, "pushed_out", "Others go first.", 4)
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "modalities": ["text", "audio"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/chat/completions", CHAT, id="chat"),
        pytest.param("/v1/chat/completions", {**CHAT, "audio": {"format": "pcm16"}, "stream": True}, id="stream"),
        pytest.param("/v1/completions", {"prompt": "Hello", "omni": {"outputs": ["thinker"]}}, id="completion"),
        pytest.param("/v1/audio/speech", {"input": "Hello"}, id="speech"),
        pytest.param("/v1/audio/speech", {"input": "Hello", "stream_format": "sse"}, id="events of speech"),
    ],
)
async def test_a_call_that_is_refused_has_the_true_status(
    model: Model, speech: Pipeline, path: str, body: dict[str, Any]
) -> None:
    app = PipelineApp(model, speech, PipelineCallEnded(REFUSED))
    client = app.post(path, **body)
    assert await client.status() == 503
    assert client.headers["retry-after"] == "4"
    assert client.error == {"message": "Others go first.", "type": "Service Unavailable", "param": None, "code": 503}
