"""What a request is expected to take, and what was observed against that, decayed."""

import pytest

from vllm_omni_plugin.balancing import Prompt
from vllm_omni_plugin.balancing.loads.estimates import DecayedRatio, OutputLengths, prompt_tokens

HALF_LIFE = 10.0


def lengths(*seen: tuple[int | None, int]) -> OutputLengths:
    lengths = OutputLengths()
    for max_tokens, tokens in seen:
        lengths.saw(max_tokens, tokens)
    return lengths


def ratio(*added: tuple[float, float, float]) -> DecayedRatio:
    ratio = DecayedRatio()
    for observed, estimated, now in added:
        ratio.add(observed, estimated, now, HALF_LIFE)
    return ratio


def test_a_prompt_has_its_tokens_and_an_unknown_one_512() -> None:
    assert prompt_tokens({"prompt": Prompt(range(7))}) == 7
    assert prompt_tokens({}) == 512


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 256), (4096, 256), (10, 10)])
def test_before_any_answer_the_first_guess_within_the_limit(max_tokens: int | None, expected: float) -> None:
    assert lengths().expected(max_tokens) == expected


def test_the_mean_is_that_of_the_guess_and_of_what_was_seen_and_follows_a_changed_workload() -> None:
    seen = lengths((None, 100), (None, 100), (None, 144))
    assert seen.expected(None) == pytest.approx((256 + 100 + 100 + 144) / 4)
    for _ in range(500):
        seen.saw(None, 10)
    assert seen.expected(None) == pytest.approx(10, abs=10)


def test_limits_of_another_magnitude_have_a_mean_of_their_own() -> None:
    seen = lengths(*[(1000, 1000), (16, 16)] * 1000)
    assert seen.expected(1000) == seen.expected(1023) == pytest.approx(1000, rel=0.01)
    assert seen.expected(16) == pytest.approx(16, rel=0.01)
    assert seen.expected(None) == 256


@pytest.mark.parametrize(
    ("added", "now", "prior", "prior_weight", "value"),
    [
        pytest.param([], 0, 3.0, 1.0, 3.0, id="without evidence the prior"),
        pytest.param([(6, 2, 0)], 0, 1.0, 2.0, (6 + 2) / (2 + 2), id="evidence and prior by their weight"),
        pytest.param([(10, 10, 0), (1, 0.01, 0)], 0, 1.0, 1e-9, 11 / 10.01, id="the ratio of sums"),
        pytest.param([(4, 1, 0)], 10, 1.0, 1.0, (2 + 1) / (0.5 + 1), id="half after a half-life"),
        pytest.param(
            [(4, 1, 0), (1, 1, 10)], 10, 1.0, 1.0, (2 + 1 + 1) / (0.5 + 1 + 1), id="and with what comes after"
        ),
        pytest.param([(800, 100, 0)], 1000, 2.0, 1.0, 2.0, id="old evidence fades into the prior"),
    ],
)
def test_the_ratio_of_what_was_observed_decays(
    added: list[tuple[float, float, float]], now: float, prior: float, prior_weight: float, value: float
) -> None:
    assert ratio(*added).value(now, HALF_LIFE, prior, prior_weight) == pytest.approx(value)
