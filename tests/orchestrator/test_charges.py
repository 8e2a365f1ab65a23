"""What requests weigh on a replica, as plain arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine_api import FakeRequest
from vllm_omni_plugin.balancing import Decision, Prompt, ReplicaLoad, Task
from vllm_omni_plugin.orchestrator.requests.charges import Account, Work
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.vllm_api.requests.engine_types import LoadReport


def charge(account: Account, task: Task, matched: int = 0, now: float = 0.0) -> StageRun:
    run = StageRun("r", FakeRequest("r"), now)
    run.dispatch(0, "r-1", task, Decision(0, "test", matched_tokens=matched), now)
    account.charge(run, now)
    account.send(run)
    return run


def charged(account: Account, prompt: int, matched: int = 0, now: float = 0.0) -> StageRun:
    return charge(account, {"prompt": Prompt(range(prompt))}, matched, now)


def test_a_prompt_is_to_be_computed_until_its_first_output_and_held_from_then_on() -> None:
    account = Account()
    run = charged(account, prompt=100, matched=64)
    assert account.load == ReplicaLoad(requests=1, prefill_tokens=36)
    account.begin(run, 2.0)
    account.produce(run, 1)
    assert (account.load.prefill_tokens, account.load.decode_tokens) == (0, 101)
    account.produce(run, 4)
    assert account.load.decode_tokens == 105
    account.release(run, 3.0)
    assert account.load == ReplicaLoad(prefill_rate=18.0)


def test_more_matched_tokens_than_the_prompt_has_are_no_negative_work() -> None:
    account = Account()
    charged(account, prompt=10, matched=64)
    assert account.load.prefill_tokens == 0


def test_a_request_of_an_unknown_prompt_still_counts() -> None:
    account = Account()
    charge(account, {})
    assert account.load == ReplicaLoad(requests=1)


def test_the_rate_counts_only_time_in_which_there_were_prompts_to_compute() -> None:
    account = Account()
    account.begin(charged(account, prompt=1000, now=0.0), 2.0)
    assert account.load.prefill_rate == 500.0
    account.begin(charged(account, prompt=1000, now=1000.0), 1002.0)
    assert account.load.prefill_rate == pytest.approx(500.0)


def test_prompts_computed_together_share_their_time() -> None:
    account = Account()
    both = [charged(account, prompt=1000, now=0.0) for _ in range(2)]
    for run in both:
        account.begin(run, 4.0)
    assert account.load.prefill_rate == 500.0


def test_the_rate_follows_a_replica_that_has_become_slow() -> None:
    account = Account()
    now = 0.0
    for seconds in [1.0] * 20 + [10.0] * 20:
        account.begin(charged(account, prompt=1000, now=now), now + seconds)
        now += seconds
    assert account.load.prefill_rate == pytest.approx(100.0, rel=0.1)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("charge"), st.integers(0, 500), st.integers(0, 500)),
        st.tuples(st.just("begin"), st.integers(0, 50), st.integers(0, 5)),
        st.tuples(st.just("release"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("report"), st.integers(0, 20), st.integers(0, 20)),
    ),
    max_size=80,
)


@given(STEPS)
def test_the_sums_are_those_of_what_is_in_flight_through_any_history(steps: list[tuple[str, int, int]]) -> None:
    account, there = Account(), list[StageRun]()
    for now, (step, first, second) in enumerate(steps):
        if step == "charge":
            there.append(charged(account, first, second, float(now)))
        elif step == "report":
            account.report(LoadReport(first, second, 0.5))
        elif there:
            run = there[first % len(there)]
            if step == "release":
                account.release(run, float(now))
                there.remove(run)
            else:
                if not run.began:
                    account.begin(run, float(now))
                account.produce(run, second)
        load = account.load
        assert load.requests - load.others == len(there)
        assert load.prefill_tokens == sum(c.prefill_tokens for c in there if not c.began)
        assert load.decode_tokens == sum(c.prompt_tokens + c.output_tokens for c in there if c.began)
        assert load.others >= 0
        assert load.prefill_rate >= 0.0
        assert 0 <= account.waiting <= sum(not c.began for c in there)


def test_what_other_heads_report_takes_the_place_of_the_engines_word() -> None:
    account = Account()
    charged(account, 10)
    account.join(Work(requests=3, prefill_tokens=200))
    account.report(LoadReport(waiting=2, running=6, kv_usage=0.5))
    assert account.own == Work(1, 10)
    assert account.load == ReplicaLoad(4, 3, 210, 0, 2, 6, 0.5, heads_report=True)
    account.join(None)
    assert account.load == ReplicaLoad(8, 7, 10, 0, 2, 6, 0.5)


def test_what_other_heads_report_outlives_our_own_requests() -> None:
    account = Account()
    run = charged(account, 10)
    account.join(Work(requests=3, prefill_tokens=200))
    account.release(run, 1.0)
    assert account.load == ReplicaLoad(3, 3, 200, heads_report=True)


def test_a_request_waits_until_its_engine_reports_that_it_runs_or_its_first_output() -> None:
    account = Account()
    first, second = (charged(account, prompt=10) for _ in range(2))
    assert account.waiting == 2
    account.report(LoadReport(waiting=1, running=1, kv_usage=0.0))
    assert account.waiting == 1
    account.begin(first, 1.0)
    assert account.waiting == 1
    account.report(LoadReport(waiting=0, running=2, kv_usage=0.0))
    assert account.waiting == 0
    charged(account, prompt=10)
    assert account.waiting == 1
    for run in (first, second):
        account.release(run, 2.0)
    account.report(LoadReport(waiting=1, running=0, kv_usage=0.0))
    assert account.waiting == 1


def test_only_what_had_no_output_can_be_waiting_whatever_the_engine_reports() -> None:
    account = Account()
    run = charged(account, prompt=10)
    account.begin(run, 1.0)
    # It was put back for want of memory, or the others are of another head.
    account.report(LoadReport(waiting=5, running=0, kv_usage=1.0))
    assert account.waiting == 0


@pytest.mark.parametrize("heads_report", [True, False], ids=["heads report", "by the engine's word"])
@pytest.mark.parametrize("running", range(8))
def test_what_waits_at_an_engine_is_shared_by_the_heads_that_sent_it(heads_report: bool, running: int) -> None:
    counts = (5, 2)
    heads = [Account() for _ in counts]
    for account, count in zip(heads, counts, strict=True):
        for _ in range(count):
            charged(account, prompt=10)
        if heads_report:
            account.join(Work(sum(counts) - count, 0))
        account.report(LoadReport(sum(counts) - running, running, kv_usage=0.0))
    excess = sum(counts) - running
    assert excess <= sum(account.waiting for account in heads) <= excess + len(heads) - 1


def test_a_load_for_another_thread_is_not_kept_since_it_may_be_stale_by_then() -> None:
    account = Account()
    charged(account, prompt=10)
    seen = account.uncached_load()
    assert seen == account.load
    assert seen is not account.load is account.load
