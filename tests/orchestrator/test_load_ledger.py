"""The load that requests put on a replica, as plain arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine_api import FakeRequest
from vllm_omni_plugin.balancing import Decision, Prompt, ReplicaAdapters, ReplicaLoad, Task
from vllm_omni_plugin.orchestrator import StageRun
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger, Work
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize, LoadReport


def charge(ledger: LoadLedger, task: Task, matched: int = 0, now: float = 0.0) -> StageRun:
    run = StageRun("r", FakeRequest("r"), now)
    run.assign(0, "r-1", task, Decision(0, "test", matched_tokens=matched), now)
    ledger.charge(run, now)
    ledger.mark_sent(run)
    return run


def charged(ledger: LoadLedger, prompt: int, matched: int = 0, now: float = 0.0) -> StageRun:
    return charge(ledger, {"prompt": Prompt(range(prompt))}, matched, now)


def test_a_prompt_is_to_be_computed_until_its_first_output_and_held_from_then_on() -> None:
    ledger = LoadLedger()
    run = charged(ledger, prompt=100, matched=64)
    assert ledger.load == ReplicaLoad(requests=1, prefill_tokens=36)
    ledger.add_first_output(run, 2.0)
    run.output_tokens += 1
    ledger.add_tokens(1, decoding=run.has_output)
    assert (ledger.load.prefill_tokens, ledger.load.decode_tokens) == (0, 101)
    run.output_tokens += 4
    ledger.add_tokens(4, decoding=run.has_output)
    assert ledger.load.decode_tokens == 105
    ledger.release(run, 3.0)
    assert ledger.load == ReplicaLoad(prefill_rate=18.0)
    assert (ledger.prompted, ledger.generated) == (100, 5)


def test_the_rate_counts_only_time_in_which_there_were_prompts_to_compute() -> None:
    ledger = LoadLedger()
    ledger.add_first_output(charged(ledger, prompt=1000, now=0.0), 2.0)
    assert ledger.load.prefill_rate == 500.0
    ledger.add_first_output(charged(ledger, prompt=1000, now=1000.0), 1002.0)
    assert ledger.load.prefill_rate == pytest.approx(500.0)


def test_the_rate_follows_a_replica_that_has_become_slow() -> None:
    ledger = LoadLedger()
    now = 0.0
    for seconds in [1.0] * 20 + [10.0] * 20:
        ledger.add_first_output(charged(ledger, prompt=1000, now=now), now + seconds)
        now += seconds
    assert ledger.load.prefill_rate == pytest.approx(100.0, rel=0.1)


def test_adapters_follow_the_requests_and_keep_the_last_ones_that_had_any() -> None:
    ledger = LoadLedger(EngineSize(adapters=2))
    runs = [charge(ledger, {"prompt": Prompt(range(9), name)}) for name in ("a", "b", "", "c", "a")]
    assert ledger.load.adapters == ReplicaAdapters(2, {"a": 2, "b": 1, "c": 1})
    for run in runs:
        ledger.release(run, 1.0)
    assert ledger.load.adapters == ReplicaAdapters(2, {}, ("c", "a"))


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
    ledger, there = LoadLedger(), list[StageRun]()
    for now, (step, first, second) in enumerate(steps):
        if step == "charge":
            there.append(charged(ledger, first, second, float(now)))
        elif step == "report":
            ledger.report(LoadReport(first, second, 0.5))
        elif there:
            run = there[first % len(there)]
            if step == "release":
                ledger.release(run, float(now))
                there.remove(run)
            else:
                if not run.has_output:
                    ledger.add_first_output(run, float(now))
                run.output_tokens += second
                ledger.add_tokens(second, decoding=run.has_output)
        load = ledger.load
        assert load.requests - load.others == len(there)
        assert load.prefill_tokens == sum(c.prefill_tokens for c in there if not c.has_output)
        assert load.decode_tokens == sum(c.prompt_tokens + c.output_tokens for c in there if c.has_output)
        assert load.others >= 0
        assert load.prefill_rate >= 0.0
        assert 0 <= ledger.waiting <= sum(not c.has_output for c in there)


def test_a_report_never_hides_this_heads_own_requests() -> None:
    """vllm#48027: a report erases what was assigned after it was taken."""
    ledger = LoadLedger()
    for _ in range(3):
        charged(ledger, prompt=10)
    ledger.report(LoadReport(waiting=0, running=1, kv_usage=0.0))
    assert (ledger.load.requests, ledger.load.others) == (3, 0)


def test_reports_of_other_heads_replace_those_of_the_engine() -> None:
    ledger = LoadLedger()
    charged(ledger, 10)
    ledger.set_others_work(Work(requests=3, prefill_tokens=200))
    ledger.report(LoadReport(waiting=2, running=6, kv_usage=0.5))
    assert ledger.own == Work(1, 10)
    assert ledger.load == ReplicaLoad(4, 3, 210, 0, 2, 6, 0.5, heads_report=True)
    ledger.set_others_work(None)
    assert ledger.load == ReplicaLoad(8, 7, 10, 0, 2, 6, 0.5)


def test_a_request_waits_until_its_engine_reports_that_it_runs_or_its_first_output() -> None:
    ledger = LoadLedger()
    first, second = (charged(ledger, prompt=10) for _ in range(2))
    assert ledger.waiting == 2
    ledger.report(LoadReport(waiting=1, running=1, kv_usage=0.0))
    assert ledger.waiting == 1
    ledger.add_first_output(first, 1.0)
    assert ledger.waiting == 1
    ledger.report(LoadReport(waiting=0, running=2, kv_usage=0.0))
    assert ledger.waiting == 0
    charged(ledger, prompt=10)
    assert ledger.waiting == 1
    for run in (first, second):
        ledger.release(run, 2.0)
    ledger.report(LoadReport(waiting=1, running=0, kv_usage=0.0))
    assert ledger.waiting == 1


@pytest.mark.parametrize("heads_report", [True, False], ids=["heads report", "by the engine's word"])
@pytest.mark.parametrize("running", range(8))
def test_requests_that_wait_at_an_engine_are_shared_by_the_heads(heads_report: bool, running: int) -> None:
    counts = (5, 2)
    heads = [LoadLedger() for _ in counts]
    for ledger, count in zip(heads, counts, strict=True):
        for _ in range(count):
            charged(ledger, prompt=10)
        if heads_report:
            ledger.set_others_work(Work(sum(counts) - count, 0))
        ledger.report(LoadReport(sum(counts) - running, running, kv_usage=0.0))
    excess = sum(counts) - running
    assert excess <= sum(ledger.waiting for ledger in heads) <= excess + len(heads) - 1


def test_a_load_for_another_thread_is_not_cached() -> None:
    ledger = LoadLedger()
    charged(ledger, prompt=10)
    seen = ledger.uncached_load()
    assert seen == ledger.load
    assert seen is not ledger.load is ledger.load
