"""Measured flow of a stage: the rate of first outputs, the time in engines, the hit ratio."""

import random

import pytest

from vllm_omni_plugin.orchestrator.pool.stage_flow import StageFlow


class Played:
    """A flow with its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.flow = StageFlow(lambda: self.now)

    def send(self, count: int = 1) -> None:
        for _ in range(count):
            self.flow.entered(self.now)

    def begin(
        self, after: float, prompt_tokens: int = 0, cached_tokens: int | None = None, in_engine_s: float | None = None
    ) -> None:
        self.now += after
        self.flow.first_output(self.now, prompt_tokens, cached_tokens, in_engine_s)

    def begin_each(self, *in_engine_s: float, every: float = 0.1) -> None:
        """Engines begin requests, each after so many seconds."""
        for seconds in in_engine_s:
            self.send()
            self.begin(every, in_engine_s=seconds)

    def drop(self, after: float, in_engine_s: float | None = None) -> None:
        self.now += after
        self.flow.dropped(self.now, in_engine_s=in_engine_s)


@pytest.fixture
def played() -> Played:
    return Played()


def test_nothing_is_known_before_a_first_output(played: Played) -> None:
    played.send()
    played.now = 5.0
    assert (played.flow.leaving_rate, played.flow.hit_ratio) == (None, None)


def test_the_rate_is_that_of_first_outputs_while_there_is_a_queue(played: Played) -> None:
    played.send(100)
    for _ in range(100):
        played.begin(after=0.5)
    assert played.flow.leaving_rate == pytest.approx(2.0, rel=0.05)


def test_time_without_a_queue_does_not_count(played: Played) -> None:
    for _ in range(100):
        played.send()
        played.begin(after=0.5)
        played.now += 1000.0
    assert played.flow.leaving_rate == pytest.approx(2.0, rel=0.05)


def test_a_request_that_is_dropped_leaves_no_queue_and_is_no_output(played: Played) -> None:
    played.send(2)
    played.begin(after=1.0)
    played.drop(after=1.0)
    played.now += 1000.0
    assert played.flow.leaving_rate == pytest.approx(0.5, rel=0.05)


def test_the_rate_falls_with_the_time_in_which_nothing_leaves_a_queue(played: Played) -> None:
    played.send(2)
    played.begin(after=1.0)
    played.now += 9.0
    assert played.flow.leaving_rate == pytest.approx(1 / 10)
    played.now += 60.0
    assert played.flow.leaving_rate == pytest.approx(1 / 70)


@pytest.mark.parametrize("drops", [0, 300], ids=["silence", "clients that give up"])
def test_a_queue_that_stands_does_not_let_the_rate_vanish(played: Played, drops: int) -> None:
    played.send(1000)
    for _ in range(100):
        played.begin(after=0.5)
    for _ in range(drops):
        played.drop(after=1.0)
    played.now += 300.0 - drops
    # It was 2.0. Of 300 s of silence after some 25 s that count, a thirteenth is left.
    assert played.flow.leaving_rate == pytest.approx(2.0 / 13, rel=0.1)
    played.now += 6 * 3600.0
    assert played.flow.leaving_rate == pytest.approx(50 / 22000, rel=0.1)


def test_the_rate_follows_a_stage_that_has_become_slow(played: Played) -> None:
    played.send(100)
    for seconds in [0.1] * 50 + [10.0] * 50:
        played.begin(after=seconds)
    assert played.flow.leaving_rate == pytest.approx(0.1, rel=0.2)


def test_the_share_of_cached_tokens_is_by_tokens_and_recent_ones_weigh_more(played: Played) -> None:
    played.send(3)
    played.begin(after=0.0, prompt_tokens=100, cached_tokens=80)
    played.begin(after=0.0, prompt_tokens=300, cached_tokens=20)
    assert played.flow.hit_ratio == 0.25
    played.begin(after=300.0, prompt_tokens=10, cached_tokens=10)
    assert played.flow.hit_ratio == pytest.approx(1.0, abs=0.01)


def test_an_engine_that_does_not_say_what_was_cached_does_not_count(played: Played) -> None:
    played.send(2)
    played.begin(after=0.0, prompt_tokens=100, cached_tokens=50)
    played.begin(after=0.0, prompt_tokens=100)
    assert played.flow.hit_ratio == 0.5


def test_nothing_is_known_of_the_time_in_engines_before_one_has_begun(played: Played) -> None:
    played.send()
    played.begin(after=1.0)
    assert played.flow.first_output_s == 0.0
    played.begin_each(2.0)
    assert played.flow.first_output_s == 2.0


def test_almost_all_begin_within_the_estimate_where_times_differ(played: Played) -> None:
    rng = random.Random(0)
    times = [rng.expovariate(1.0) for _ in range(2000)]
    played.begin_each(*times)
    within = [each <= played.flow.first_output_s for each in times]
    assert 0.95 < sum(within) / len(within) < 1.0


def test_the_estimate_follows_engines_that_have_become_slow_and_fast_again(played: Played) -> None:
    played.begin_each(*[0.1] * 100)
    assert played.flow.first_output_s == pytest.approx(0.1)
    played.begin_each(*[2.0] * 100)
    assert played.flow.first_output_s > 2.0
    played.begin_each(*[0.1] * 500)
    assert played.flow.first_output_s == pytest.approx(0.1, abs=0.05)


def test_a_slow_minute_long_ago_is_forgotten_at_the_next_request(played: Played) -> None:
    played.begin_each(*[10.0] * 20)
    played.now += 600.0
    played.begin_each(0.1)
    assert played.flow.first_output_s == pytest.approx(0.1, abs=0.2)


def test_an_aborted_request_counts_only_if_it_took_longer_than_the_estimate(played: Played) -> None:
    played.begin_each(*[0.1] * 20)
    played.send(2)
    played.drop(after=0.0, in_engine_s=0.05)
    assert played.flow.first_output_s == pytest.approx(0.1)
    played.drop(after=0.0, in_engine_s=5.0)
    assert played.flow.first_output_s > 0.3


def test_first_outputs_of_one_message_all_count_and_do_not_displace_those_before(played: Played) -> None:
    played.begin_each(*[0.1] * 100)
    played.begin_each(*[1.0] * 80, every=0.0)
    assert 1.0 < played.flow.first_output_s < 3.0
    played.begin_each(*[0.1] * 80, every=0.0)
    assert played.flow.first_output_s > 1.0
