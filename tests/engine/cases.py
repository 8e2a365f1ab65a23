"""Requests whose answers must not depend on who serves them: greedy, or with a seed."""

from dataclasses import dataclass
from typing import Any

from .server import MODEL, RUST

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
CHATS = "/v1/chat/completions/batch"
MESSAGE_API = "/v1/messages"
COUNT_TOKENS = f"{MESSAGE_API}/count_tokens"
GENERATE = "/inference/v1/generate"
REACH_ENGINES = (COMPLETIONS, CHAT, RESPONSES, CHATS, MESSAGE_API, GENERATE)

PROMPT = "A head takes every request"
MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "How many engines are running?"},
]
CITY_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
        "open": {"type": "boolean"},
    },
    "required": ["city", "days", "open"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": CITY_SCHEMA}}
NEWS = {"type": "function", "function": {"name": "get_news", "parameters": CITY_SCHEMA}}


@dataclass(frozen=True)
class Case:
    """One request. Without a body it is a GET."""

    name: str
    path: str
    body: dict[str, Any] | None
    status: int = 200

    def status_of(self, front_end: str) -> int:
        """What one plain engine answers with this front end of vLLM."""
        if front_end != RUST:
            return self.status
        return RUST_STATUS.get(self.name) or RUST_STATUS_OF_PATH.get(self.path, self.status)

    def reaches_engine(self, front_end: str = "python") -> bool:
        return self.status == self.status_of(front_end) == 200 and self.path in REACH_ENGINES

    def __str__(self) -> str:
        return self.name


def _completion(name: str, status: int = 200, **changes: Any) -> Case:
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **changes}
    return Case(f"completion-{name}", COMPLETIONS, body, status)


def _chat(name: str, status: int = 200, **changes: Any) -> Case:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **changes}
    return Case(f"chat-{name}", CHAT, body, status)


def _response(name: str, **changes: Any) -> Case:
    body = {"model": MODEL, "input": PROMPT, "max_output_tokens": 12, "temperature": 0, **changes}
    return Case(f"response-{name}", RESPONSES, body)


def _chats(name: str, status: int = 200, **changes: Any) -> Case:
    conversations = [MESSAGES, MESSAGES[1:], [{"role": "user", "content": PROMPT}]]
    body = {"model": MODEL, "messages": conversations, "max_tokens": 12, "temperature": 0, **changes}
    return Case(f"chats-{name}", CHATS, body, status)


def _message(name: str, status: int = 200, **changes: Any) -> Case:
    asked = {"system": MESSAGES[0]["content"], "messages": MESSAGES[1:]}
    body = {"model": MODEL, **asked, "max_tokens": 12, "temperature": 0, **changes}
    return Case(f"message-{name}", MESSAGE_API, body, status)


def _generate(name: str, status: int = 200, sampling: dict[str, Any] | None = None, **changes: Any) -> Case:
    params = {"max_tokens": 12, "temperature": 0, **(sampling or {})}
    body = {"model": MODEL, "token_ids": [5, 17, 300, 42, 8], "sampling_params": params, **changes}
    return Case(f"generate-{name}", GENERATE, body, status)


def _get(name: str, path: str) -> Case:
    return Case(name, path, None)


SAMPLES: dict[str, Any] = {"n": 3, "temperature": 0.9, "seed": 7}
"""vLLM refuses several samples of a greedy request. With a seed they are as repeatable."""
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
STREAM_USAGE: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}

COMPLETION_CASES = (
    _completion("greedy"),
    _completion("stream", **STREAM),
    _completion("stream-without-usage", stream=True),
    _completion("stream-running-usage", **STREAM_USAGE),
    _completion("logprobs", logprobs=3),
    _completion("stream-logprobs", logprobs=3, **STREAM),
    _completion("n", **SAMPLES),
    _completion("stream-n", **SAMPLES, **STREAM),
    _completion("n-json-schema", **SAMPLES, response_format=JSON_SCHEMA, max_tokens=64),
    _completion("stop", stop=["s"], max_tokens=64),
    _completion("stop-kept", stop=["s"], max_tokens=64, include_stop_str_in_output=True),
    _completion("stream-stop", stop=["s"], max_tokens=64, **STREAM),
    _completion("stop-token", stop_token_ids=list(range(60, 90)), max_tokens=64),
    _completion("token-ids", prompt=[5, 17, 300, 42, 8]),
    _completion("token-ids-returned", return_token_ids=True),
    _completion("stream-token-ids-returned", return_token_ids=True, **STREAM),
    _completion("prompts", prompt=["One head", "two engines", "many requests here"]),
    _completion("stream-prompts", prompt=["One head", "two engines"], **STREAM),
    _completion("prompts-of-token-ids", prompt=[[5, 17, 300], [42, 8]]),
    _completion("echo", echo=True),
    _completion("echo-logprobs", echo=True, logprobs=2),
    _completion("stream-echo", echo=True, **STREAM),
    _completion("prompt-logprobs", prompt_logprobs=2),
    _completion("min-tokens", min_tokens=6, stop=["a", "e", "s"], max_tokens=20),
    _completion("ignore-eos", ignore_eos=True, max_tokens=40),
    _completion("seed", temperature=1.0, seed=1234, top_p=0.9, top_k=40, min_p=0.01),
    _completion("penalties", presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3, max_tokens=32),
    _completion("bad-words", bad_words=["e", "a", "the"], max_tokens=24),
    _completion("logit-bias", logit_bias={"80": 100.0}),
    _completion("allowed-tokens", allowed_token_ids=[70, 80, 90]),
    _completion("truncated-prompt", truncate_prompt_tokens=4),
    _completion("long", prompt=PROMPT * 20, max_tokens=100),
    _completion("one-token", max_tokens=1),
    _completion("no-token", max_tokens=0, echo=True),
    _completion("beams", use_beam_search=True, n=2),
    _completion("json-schema", response_format=JSON_SCHEMA, max_tokens=64),
    _completion("regex", structured_outputs={"regex": "[ab]{3}-[0-9]{4}"}, max_tokens=32),
    _completion("choice", structured_outputs={"choice": ["alpha", "beta", "gamma"]}, max_tokens=32),
)
CHAT_CASES = (
    _chat("greedy"),
    _chat("stream", **STREAM),
    _chat("n", **SAMPLES),
    _chat("stream-n", **SAMPLES, **STREAM),
    _chat("logprobs", logprobs=True, top_logprobs=3),
    _chat("stream-logprobs", logprobs=True, top_logprobs=3, **STREAM),
    _chat("stop", stop=["s", "."], max_tokens=64),
    _chat("max-completion-tokens", max_completion_tokens=5, max_tokens=None),
    _chat("json-schema", response_format=JSON_SCHEMA, max_tokens=64),
    _chat("stream-json-schema", response_format=JSON_SCHEMA, max_tokens=64, **STREAM),
    _chat("json-object", response_format={"type": "json_object"}, structured_outputs=None, max_tokens=40),
    _chat("regex", structured_outputs={"regex": "[ab]{3}-[0-9]{4}"}, max_tokens=32),
    _chat("tool-named", tools=[WEATHER], tool_choice=WEATHER | {"function": {"name": "get_weather"}}, max_tokens=64),
    _chat("tool-required", tools=[WEATHER, NEWS], tool_choice="required", max_tokens=200),
    _chat("stream-tool-required", tools=[WEATHER, NEWS], tool_choice="required", max_tokens=200, **STREAM),
    _chat("tool-auto", tools=[WEATHER, NEWS]),
    _chat("continued", add_generation_prompt=False, continue_final_message=True),
    _chat("token-ids-returned", return_token_ids=True),
    _chat("prompt-logprobs", prompt_logprobs=1),
    _chat("seed", temperature=0.8, seed=99),
)
RESPONSE_CASES = (
    _response("greedy"),
    _response("stream", stream=True),
    _response("schema", text={"format": {"type": "json_schema", "name": "city", "schema": CITY_SCHEMA}}),
)
TOOL = {"name": "get_weather", "description": "d", "input_schema": CITY_SCHEMA}
"""As the Messages API has it."""
MESSAGE_CASES = (
    _message("greedy"),
    _message("stream", stream=True),
    _message("stop", stop_sequences=["s"], max_tokens=64),
    _message("stream-tool", tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}, stream=True),
)
BATCH_CASES = (
    _chats("greedy"),
    _chats("logprobs", logprobs=True, top_logprobs=2),
)
GENERATE_CASES = (
    _generate("greedy"),
    _generate("stream", **STREAM),
    _generate("logprobs", sampling={"logprobs": 2, "prompt_logprobs": 1}),
    _generate("n", sampling=SAMPLES),
)
OTHER_CASES = (
    _get("models", "/v1/models"),
    _get("version", "/version"),
    Case("tokenize", "/tokenize", {"model": MODEL, "prompt": PROMPT}),
    Case("tokenize-chat", "/tokenize", {"model": MODEL, "messages": MESSAGES}),
    Case("count-tokens", COUNT_TOKENS, {"model": MODEL, "messages": MESSAGES[1:]}),
    Case("detokenize", "/detokenize", {"model": MODEL, "tokens": [5, 17, 300, 42, 8]}),
)
ERROR_CASES = (
    _completion("prompt-too-long", 400, prompt=[5] * 2000),
    _completion("too-many-tokens", 400, max_tokens=5000),
    _completion("negative-temperature", 400, temperature=-1),
    _completion("bad-top-p", 400, top_p=3),
    _completion("bad-type", 400, max_tokens="many"),
    _completion("no-samples", 400, n=0),
    _completion("greedy-samples", 400, n=2),
    _completion("unknown-token", 400, prompt=[100000]),
    _completion("bad-regex", 400, structured_outputs={"regex": "[a"}),
    _completion("too-many-logprobs", 400, logprobs=1000),
    _completion("unknown-model", 404, model="nobody"),
    _completion("stream-prompt-too-long", 400, prompt=[5] * 2000, **STREAM),
    _chat("no-messages", 400, messages=[]),
    _chats("several-samples", 400, n=2),
    _message("unknown-model", 404, model="nobody"),
    _generate("prompt-too-long", 400, token_ids=[5] * 2000),
    _chat("bad-role", 400, messages=[{"role": "user", "content": 3}]),
    _chat("unknown-tool", 400, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "nobody"}}),
)
CASES = (
    *(*COMPLETION_CASES, *CHAT_CASES, *RESPONSE_CASES, *MESSAGE_CASES, *BATCH_CASES, *GENERATE_CASES),
    *(*OTHER_CASES, *ERROR_CASES),
)

RUST_STATUS_OF_PATH = {RESPONSES: 404, CHATS: 501, MESSAGE_API: 501, COUNT_TOKENS: 501}
"""Paths that vLLM's Rust front end does not serve."""
_REFUSED = (
    *("completion-n", "completion-stream-n", "completion-n-json-schema", "chat-n", "chat-stream-n", "generate-n"),
    *("completion-prompts", "completion-stream-prompts", "completion-prompts-of-token-ids"),
    *("completion-beams", "chat-continued"),
)
_ACCEPTED = ("completion-too-many-tokens", "completion-no-samples")
RUST_STATUS = dict.fromkeys(_REFUSED, 400) | dict.fromkeys(_ACCEPTED, 200)
"""By name of the case, where vLLM's Rust front end answers another status than its Python front end."""
