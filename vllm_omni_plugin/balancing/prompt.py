"""A prompt as a prefix cache knows it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class MediaSpan(NamedTuple):
    """Where a multimodal input stands in a prompt.

    Attributes:
        identifier: hash of its content.
        offset: first of its placeholder tokens.
        length: number of these.
    """

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What decides which cached blocks a request can use.

    Attributes:
        token_ids: the prompt; its length alone counts where `cacheable` is false.
        lora_name: the adapter, "" for none.
        cache_salt: shares blocks only with prompts of the same salt, "" for none.
        media: multimodal inputs, in order of their offsets.
        cacheable: whether the engine may take blocks of this prompt from its cache.
    """

    token_ids: Sequence[int]
    lora_name: str = ""
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    cacheable: bool = True
    # By block size, once they were asked for: a request is hashed once, whoever asks how often.
    known_keys: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)


NO_PROMPT = Prompt((), cacheable=False)
"""Of a request whose prompt is not known."""
