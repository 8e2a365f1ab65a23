"""What is expected of a request's size."""

import pytest

from vllm_omni_plugin.balancing import Prompt
from vllm_omni_plugin.balancing.request_size import OutputLengths, prompt_tokens


def test_a_prompt_has_its_tokens_and_an_unknown_one_512() -> None:
    assert prompt_tokens({"prompt": Prompt(range(7))}) == 7
    assert prompt_tokens({}) == 512


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 256), (4096, 256), (10, 10)])
def test_before_any_answer_the_first_guess_within_the_limit(max_tokens: int | None, expected: float) -> None:
    assert OutputLengths().expected(max_tokens) == expected


def test_the_mean_is_that_of_the_guess_and_of_what_was_seen() -> None:
    lengths = OutputLengths()
    for tokens in (100, 100, 144):
        lengths.saw(None, tokens)
    assert lengths.expected(None) == pytest.approx((256 + 100 + 100 + 144) / 4)


def test_limits_of_another_magnitude_have_a_mean_of_their_own() -> None:
    lengths = OutputLengths()
    for _ in range(1000):
        lengths.saw(1000, 1000)
        lengths.saw(16, 16)
    assert lengths.expected(1000) == pytest.approx(1000, rel=0.01)
    assert lengths.expected(16) == pytest.approx(16, rel=0.01)
    assert lengths.expected(1023) == lengths.expected(1000)
    assert lengths.expected(None) == 256


def test_a_mean_follows_a_changed_workload() -> None:
    lengths = OutputLengths()
    for tokens in [1000] * 10_000 + [10] * 500:
        lengths.saw(None, tokens)
    assert lengths.expected(None) == pytest.approx(10, abs=10)
