"""Requests that move in the middle of their answers, one for each row of the table in docs/behaviour.md."""

from dataclasses import dataclass, field
from typing import Any

from .server import MODEL

ADAPTER = "storyteller"
TOKENS = 600
PROMPT = "A head takes every request"
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLED: dict[str, Any] = {"temperature": 0.9}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 1234}
EACH_LETTER = {f"{letter}": 1.5 for letter in range(70, 90)}


@dataclass(frozen=True)
class Row:
    """One request and how it moves.

    Attributes:
        way: value of the label `way` of its move.
        body: what is sent.
        exact: whether its whole answer is the same every time; else only its shape is.
        path: route it is sent to.
    """

    name: str
    way: str
    changes: dict[str, Any]
    exact: bool = True
    path: str = "/v1/completions"
    body: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        input_ = (
            {"prompt": PROMPT} if self.path == "/v1/completions" else {"messages": [{"role": "user", "content": "?"}]}
        )
        fixed = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        object.__setattr__(self, "body", {**fixed, **input_, **self.changes})

    def __str__(self) -> str:
        return self.name


ROWS = (
    Row("greedy", "resume", {}),
    Row("greedy-stream", "resume", STREAM),
    Row("chat-stream", "resume", STREAM, path="/v1/chat/completions"),
    Row("sampled", "resume", SAMPLED | {"top_p": 0.9, "top_k": 50, "min_p": 0.01}, exact=False),
    Row("n", "resume", SAMPLED | {"n": 2}, exact=False),
    Row("logprobs", "resume", {"logprobs": 3}),
    Row("logprobs-stream", "resume", {"logprobs": 3, **STREAM}),
    Row("prompt-logprobs", "resume", {"prompt_logprobs": 2}),
    Row("echo-logprobs", "resume", {"echo": True, "logprobs": 1}),
    Row("min-tokens", "resume", {"min_tokens": 450, "stop_token_ids": list(range(3, 512))}),
    Row("stop-strings", "resume", {"min_tokens": 450, "stop": [chr(code) for code in range(97, 123)], **STREAM}),
    Row("repetition-penalty", "resume", {"repetition_penalty": 1.3}),
    Row("one-token-bad-word", "resume", {"bad_words": ["e"]}),
    Row("logit-bias", "resume", {"logit_bias": EACH_LETTER}),
    Row("allowed-tokens", "resume", {"allowed_token_ids": list(range(60, 120))}),
    Row("token-ids", "resume", {"return_token_ids": True, **STREAM}),
    Row("lora", "resume", {"model": ADAPTER}),
    Row("seed", "replay", SEEDED),
    Row("seed-stream-logprobs", "replay", SEEDED | {"logprobs": 2, **STREAM}),
    Row("seeded-n", "replay", SEEDED | {"n": 2}),
    Row("penalties", "replay", {"presence_penalty": 1.5, "frequency_penalty": 0.2, **STREAM}),
    Row("sampled-penalties", "replay", SAMPLED | {"presence_penalty": 1.5}, exact=False),
    Row("bad-words", "replay", {"bad_words": ["every request", "engines are"]}),
    Row("regex", "replay", {"structured_outputs": {"regex": "([ab]{3}-[0-9]{4} ){90}"}, **STREAM}),
    Row("sampled-regex", "replay", SAMPLED | {"structured_outputs": {"regex": "([ab]{3}-[0-9]{4} ){90}"}}, exact=False),
    Row("repetition-detection", "replay", {"repetition_detection": {"max_pattern_size": 2, "min_count": 400}}),
)
