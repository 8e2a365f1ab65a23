"""Block keys differ exactly where vLLM's prefix cache differs."""

import pytest

from vllm_omni_plugin.balancing import MediaSpan, Prompt
from vllm_omni_plugin.balancing.caches.block_keys import answered_keys, block_key, pack_tokens, prompt_keys

TOKENS = list(range(100, 140))


def test_every_full_block_but_the_last_token_has_a_key() -> None:
    counts = [len(prompt_keys(Prompt(TOKENS[:length]), 8)) for length in (0, 1, 8, 9, 16, 17, 40)]
    assert counts == [0, 0, 0, 1, 1, 2, 4]


def test_keys_chain_the_tokens_of_blocks() -> None:
    first = block_key(0, pack_tokens(TOKENS[:16]))
    second = block_key(first, pack_tokens(TOKENS[16:32]))
    assert prompt_keys(Prompt(TOKENS), 16) == [first, second]


def test_a_token_changes_its_block_and_all_later_ones() -> None:
    other = [*TOKENS[:10], 1, *TOKENS[11:]]
    same = [a == b for a, b in zip(prompt_keys(Prompt(TOKENS), 8), prompt_keys(Prompt(other), 8), strict=True)]
    assert same == [True, False, False, False]


@pytest.mark.parametrize(
    "other",
    [
        Prompt(TOKENS, lora_name="sql"),
        Prompt(TOKENS, cache_salt="tenant-1"),
        Prompt(TOKENS, lora_name="sql", cache_salt="tenant-1"),
        Prompt(TOKENS, media=(MediaSpan("a-cat", 2, 4),)),
        Prompt(TOKENS, media=(MediaSpan("a-dog", 2, 4),)),
        Prompt(TOKENS, media=(MediaSpan("a-cat", 3, 4),)),
    ],
    ids=["lora", "salt", "lora-and-salt", "image", "another-image", "image-elsewhere"],
)
def test_adapter_salt_and_media_change_all_blocks(other: Prompt) -> None:
    plain = Prompt(TOKENS)
    assert not set(prompt_keys(plain, 8)) & set(prompt_keys(other, 8))


def test_an_image_changes_its_block_and_all_later_ones() -> None:
    keys = prompt_keys(Prompt(TOKENS), 8)
    with_image = prompt_keys(Prompt(TOKENS, media=(MediaSpan("a-cat", 17, 4),)), 8)
    assert [a == b for a, b in zip(keys, with_image, strict=True)] == [True, True, False, False]


def test_a_prompt_that_cannot_use_the_cache_has_no_keys() -> None:
    assert prompt_keys(Prompt(TOKENS, cacheable=False), 8) == []
    assert answered_keys(Prompt(TOKENS, cacheable=False), [1, 2], 8) == []


@pytest.mark.parametrize("media", [(), (MediaSpan("a-cat", 17, 4),), (MediaSpan("a-cat", 17, 14),)])
@pytest.mark.parametrize("length", [1, 8, 9, 20, 39])
def test_the_keys_of_an_answer_are_those_of_the_next_turn(length: int, media: tuple[MediaSpan, ...]) -> None:
    prompt = Prompt(TOKENS[:length], lora_name="sql", media=media)
    next_turn = Prompt(TOKENS, lora_name="sql", media=media)
    assert answered_keys(prompt, TOKENS[length:], 8) == prompt_keys(next_turn, 8)
    assert prompt_keys(prompt, 8) == prompt_keys(next_turn, 8)[: (length - 1) // 8]
