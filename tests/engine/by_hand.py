"""What models answer that are run one after the other by hand, without vLLM."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


@functools.cache
def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def chat_prompt(folder: Path, text: str) -> str:
    prompt: str = tokenizer_of(folder).apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return prompt


def token_ids(folder: Path, text: str) -> list[int]:
    ids: list[int] = tokenizer_of(folder)(text)["input_ids"]
    return ids


def text_of(folder: Path, tokens: Sequence[int]) -> str:
    return str(tokenizer_of(folder).decode(tokens))


def without_specials(folder: Path, text: str) -> str:
    """A text without the special tokens of a model, which mean nothing to another one."""
    return str(tokenizer_of(folder).decode(token_ids(folder, text), skip_special_tokens=True))


def greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The most likely tokens after a prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = _model(folder, AutoModelForCausalLM)
    made: list[int] = []
    cache, new = None, list(prompt)
    with torch.inference_mode():
        while len(made) < count:
            output = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache, new = output.past_key_values, [int(output.logits[0, -1].argmax())]
            made += new
    return made


def answer(folder: Path, prompt: str, count: int) -> str:
    return text_of(folder, greedy(folder, token_ids(folder, prompt), count))


def session(folder: Path, turns: Iterable[tuple[Sequence[int], int]]) -> list[int]:
    """The greedy tokens of a streaming-input session: of each turn a prompt, and how many tokens follow on it.

    vLLM drops the last token of a turn when the next one begins, since it was never computed on.
    """
    context: list[int] = []
    made: list[int] = []
    for prompt, count in turns:
        context += prompt
        tokens = greedy(folder, context, count)
        context += tokens[:-1]
        made += tokens
    return made


def class_probabilities(folder: Path, text: str) -> list[float]:
    """A classifier's verdict on a text."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = _model(folder, AutoModelForSequenceClassification)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids(folder, text)])).logits[0]
    probabilities: list[float] = torch.softmax(logits, dim=-1).tolist()
    return probabilities


@functools.cache
def _model(folder: Path, kind: Any) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()
    return kind.from_pretrained(folder)
