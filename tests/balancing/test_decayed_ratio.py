"""Observed against estimated, decayed."""

import pytest

from vllm_omni_plugin.balancing.decayed_ratio import DecayedRatio

HALF_LIFE = 10.0


def value(ratio: DecayedRatio, now: float, prior: float = 1.0, prior_weight: float = 1.0) -> float:
    return ratio.value(now, HALF_LIFE, prior, prior_weight)


def test_without_evidence_it_is_the_prior() -> None:
    assert value(DecayedRatio(), 0, prior=3.0) == 3.0


def test_evidence_and_prior_count_by_their_weight() -> None:
    ratio = DecayedRatio()
    ratio.add(observed=6.0, estimated=2.0, now=0, half_life=HALF_LIFE)
    assert value(ratio, 0, prior=1.0, prior_weight=2.0) == pytest.approx((6 + 2) / (2 + 2))


def test_it_is_the_ratio_of_sums_so_that_a_tiny_request_counts_little() -> None:
    ratio = DecayedRatio()
    ratio.add(10.0, 10.0, 0, HALF_LIFE)
    ratio.add(1.0, 0.01, 0, HALF_LIFE)
    assert value(ratio, 0, prior_weight=1e-9) == pytest.approx(11 / 10.01)


def test_evidence_counts_half_after_a_half_life_whether_more_comes_or_not() -> None:
    ratio = DecayedRatio()
    ratio.add(4.0, 1.0, 0, HALF_LIFE)
    assert value(ratio, 10) == pytest.approx((2 + 1) / (0.5 + 1))
    ratio.add(1.0, 1.0, 10, HALF_LIFE)
    assert value(ratio, 10) == pytest.approx((2 + 1 + 1) / (0.5 + 1 + 1))


def test_old_evidence_fades_into_the_prior() -> None:
    ratio = DecayedRatio()
    ratio.add(800.0, 100.0, 0, HALF_LIFE)
    assert value(ratio, 1000, prior=2.0) == pytest.approx(2.0)
