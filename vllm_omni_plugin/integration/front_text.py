"""Answers in the tokens of another model than the prompt's, as text."""

from copy import deepcopy
from functools import wraps
from typing import Any

from msgspec.structs import replace
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

_TEXT_IN_FRONT = "a"
"""An answer's first word keeps the space in front of it when it follows some text, as it does behind any prompt."""


def answer_with(output_processor: Any, tokenizer: Any) -> None:
    """Make AsyncLLM's `OutputProcessor` read the tokens of answers with this tokenizer.

    vLLM begins to read an answer with the tokens of the prompt, which mean something else to this tokenizer.
    """
    own_add_request = output_processor.add_request
    # Its own copy: tokenizers cannot be used by several threads at once.
    own_tokenizer = output_processor.tokenizer = deepcopy(tokenizer)
    in_front = own_tokenizer.encode(_TEXT_IN_FRONT, add_special_tokens=False)

    @wraps(own_add_request)
    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        is_new = request.request_id not in output_processor.request_states
        own_add_request(request, *args, **kwargs)
        if is_new and request.sampling_params is not None and request.sampling_params.detokenize:
            output_processor.request_states[request.request_id].detokenizer = IncrementalDetokenizer.from_new_request(
                own_tokenizer, replace(request, prompt_token_ids=in_front, prompt_embeds=None)
            )

    output_processor.add_request = add_request
