"""Our metrics in a scrape."""

import pytest
from prometheus_client.samples import Sample

from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.fleet import FakeFleet
from tests.fakes.pipeline_fleet import FakePipelineFleet, stage
from tests.orchestrator.work_bus import Timers
from vllm_omni_plugin.admin.metrics.catalogue import METRICS, PREFIX
from vllm_omni_plugin.admin.metrics.fleet_metrics import FleetCollector
from vllm_omni_plugin.admission import AdmissionConfig, RequestTerms, TenantSettings, Ticket
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.coordinator import HeadWork, SessionLost
from vllm_omni_plugin.orchestrator import Orchestrator, StagePool
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.pool.work_exchange import WorkExchange
from vllm_omni_plugin.orchestrator.requests.counters import WaitingCounts
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move


def samples(orchestrator: Orchestrator, name: str) -> list[Sample]:
    found = [sample for family in FleetCollector(orchestrator).collect() for sample in family.samples]
    return [sample for sample in found if sample.name == f"{PREFIX}{name}"]


def by(orchestrator: Orchestrator, label: str, name: str) -> dict[str, float]:
    """Values of a metric by one label."""
    return {sample.labels[label]: sample.value for sample in samples(orchestrator, name)}


def value(orchestrator: Orchestrator, name: str, /, **labels: str) -> float | None:
    return next((sample.value for sample in samples(orchestrator, name) if sample.labels == labels), None)


class Broken:
    def select(self, task: object, replicas: object) -> int:
        raise RuntimeError("broken")


def empty_orchestrator(plan: AdmissionConfig | None = None) -> Orchestrator:
    pools = [StagePool(0, LeastQueueLengthBalancer())]
    return Orchestrator(pools, [FakeEngineApi()], HeadRules(3, admission=plan), lambda: 0.0)


def test_without_admission_control_there_are_no_metrics_of_classes_and_tenants() -> None:
    families = {family.name.removeprefix(PREFIX) for family in FleetCollector(empty_orchestrator()).collect()}
    of_admission = {metric.name for metric in METRICS if {"class", "tenant"} & set(metric.labels)}
    assert not families & of_admission


async def test_the_families_are_those_of_the_catalogue() -> None:
    exchange = WorkExchange(print, call_later=Timers().call_later)
    plan = AdmissionConfig(tenants={"tenant": TenantSettings()})
    async with FakeFleet(replicas=1, balancer=Broken(), exchange=exchange, plan=plan) as fleet:
        fleet.orchestrator.metrics.coordinator_connected = True
        await fleet.submit("a", prompt=[1] * 10, terms=RequestTerms("tenant"))
        fleet.say("a", 1, cached=4)
        fleet.orchestrator.metrics.requests_refused[(0, "deadline", "503")] = 1
        fleet.orchestrator.metrics.requests_refused_before_accept[(0, "deadline", "503")] = 2
        fleet.orchestrator.metrics.observe_stage(0, "talker", "run", 1.0)
        shown = {
            family.name.removeprefix(PREFIX): (family.type, family.documentation, {*family.samples[0].labels} - {"le"})
            for family in FleetCollector(fleet.orchestrator).collect()
        }
        refused = value(fleet.orchestrator, "requests_refused_total", stage="0", reason="deadline", status="503")
    assert shown == {metric.name: (metric.kind, metric.meaning, set(metric.labels)) for metric in METRICS}
    assert refused == 3


@pytest.mark.parametrize(("tenant", "label"), [("acme", "acme"), ("other", "other_"), ("other_", "other__")])
async def test_a_tenant_of_the_file_with_a_reserved_name_gets_a_suffix(tenant: str, label: str) -> None:
    async with FakeFleet(replicas=1, plan=AdmissionConfig(tenants={tenant: TenantSettings()})) as fleet:
        await fleet.submit("a", prompt=[1], terms=RequestTerms(tenant))
        in_flight = by(fleet.orchestrator, "tenant", "tenant_requests_in_flight")
        assert (in_flight[label], in_flight["other"]) == (1, 0)


def test_ten_thousand_tenants_that_are_not_in_the_file_have_one_label() -> None:
    orchestrator = empty_orchestrator(AdmissionConfig(tenants={"known": TenantSettings()}))
    admission = orchestrator.admission
    for number in range(10_000):
        ticket = admission.new_ticket(RequestTerms(f"made-up-{number}"), 0, 10, 0.0)
        assert isinstance(ticket, Ticket)
        admission.started(ticket)
        admission.ended(ticket, 5, 0.0)
    for name in ("requests_waiting", "requests_in_flight", "tokens_total"):
        tenants = by(orchestrator, "tenant", f"tenant_{name}")
        assert tenants.keys() == {"known", "other"}
    assert tenants == {"known": 0, "other": 150_000}
    assert "other" not in by(orchestrator, "tenant", "tenant_weight")


def test_a_head_that_can_be_joined_reports_heads_and_coordinator() -> None:
    orchestrator = empty_orchestrator()
    orchestrator.stage_pools[0].exchange = exchange = WorkExchange(print, call_later=Timers().call_later)
    assert value(orchestrator, "heads") == 1
    assert value(orchestrator, "coordinator_connected") is None
    exchange.handle(HeadWork("another", True, []))
    orchestrator.metrics.coordinator_connected = True
    assert value(orchestrator, "heads") == 2
    assert value(orchestrator, "coordinator_connected") == 1
    exchange.handle(SessionLost())
    orchestrator.metrics.coordinator_connected = False
    assert value(orchestrator, "heads") == 1
    assert value(orchestrator, "coordinator_connected") == 0


async def test_replicas_are_counted_by_state_and_every_state_is_shown() -> None:
    async with FakeFleet(replicas=3) as fleet:
        fleet.lose(1)
        fleet.pool.add().other_generation = "dtype: head has a, replica b"
        states = by(fleet.orchestrator, "state", "replicas")
    assert states == {"up": 2, "down": 1, "error": 0, "draining": 0, "other-generation": 1}


async def test_work_is_counted_per_replica() -> None:
    async with FakeFleet(replicas=2) as fleet:
        for name in "abcd":
            await fleet.submit(name)
        fleet.say("a", finish_reason="stop")
        fleet.pool.member(1).restarts = 3
        assert by(fleet.orchestrator, "replica", "assignments_total") == {"0": 2, "1": 2}
        assert sorted(by(fleet.orchestrator, "replica", "requests_in_flight").values()) == [1, 2]
        assert by(fleet.orchestrator, "replica", "replica_restarts_total") == {"0": 0, "1": 3}
        assert by(fleet.orchestrator, "stage", "assignments_total") == {"0": 2}


async def test_the_counts_of_a_replica_that_left_stay_and_its_successor_goes_on_counting() -> None:
    async with FakeFleet(replicas=2) as fleet:
        await fleet.submit("a", affinity=1)
        fleet.pool.member(1).restarts = 3
        fleet.lose(1)
        fleet.orchestrator.replica_left(fleet.pool.member(1))
        counts = [by(fleet.orchestrator, "replica", name) for name in ("assignments_total", "replica_restarts_total")]
        assert counts == [{"0": 1, "1": 1}, {"0": 0, "1": 3}]
        assert by(fleet.orchestrator, "replica", "requests_in_flight") == {"0": 1}
        fleet.join(fleet.pool.add(1))
        await fleet.submit("b", affinity=1)
        assert by(fleet.orchestrator, "replica", "assignments_total") == {"0": 1, "1": 2}


def test_counts_have_their_names() -> None:
    orchestrator = empty_orchestrator()
    metrics = orchestrator.metrics
    metrics.waiting_in[0] = lambda: WaitingCounts(held=1, paused=3, moving=2, queued=0)
    metrics.held_before_accept = 7
    metrics.request_moves |= {Move.RESTART: 4, Move.RESUME: 5, Move.REPLAY: 6}
    metrics.requests_failed |= {"replica_lost": 1, "query_of_death": 2, "no_replica": 3}
    metrics.requests_failed_before_accept = 2
    metrics.decision_fallbacks[0, "Broken", "policy-fault"] = 1
    metrics.tokens_swallowed, metrics.replays_diverged, metrics.idle_while_waiting = 8, 9, 10
    metrics.matched_tokens, metrics.cached_tokens = 96, 80
    assert by(orchestrator, "where", "requests_held") == {"http": 7, "fleet": 1, "move": 2, "paused": 3}
    assert by(orchestrator, "stage", "requests_waiting") == {"0": 7 + 1 + 2 + 3}
    assert by(orchestrator, "way", "request_moves_total") == {"restart": 4, "resume": 5, "replay": 6}
    failed = by(orchestrator, "reason", "requests_failed_total")
    assert failed == {"replica_lost": 1, "query_of_death": 2, "no_replica": 3 + 2}
    assert by(orchestrator, "fallback", "decision_fallbacks_total") == {"policy-fault": 1}
    for name in ("tokens_swallowed", "replays_diverged", "idle_while_waiting", "matched_tokens", "cached_tokens"):
        assert value(orchestrator, f"{name}_total") == getattr(metrics, name)


async def test_the_work_of_each_replica_is_shown_as_policies_see_it() -> None:
    async with FakeFleet(replicas=2) as fleet:
        await fleet.submit("a", prompt=[1] * 30, affinity=0)
        await fleet.submit("b", prompt=[1] * 50, affinity=1)
        link, attempt = fleet.attempt("b")
        link.output(attempt, 1, 2)
        link.report(running=25)
        assert by(fleet.orchestrator, "replica", "prefill_tokens") == {"0": 30, "1": 0}
        assert by(fleet.orchestrator, "replica", "decode_tokens") == {"0": 0, "1": 52}
        assert by(fleet.orchestrator, "replica", "kv_cache_usage_ratio") == {"0": 0, "1": 0.25}
        # Those of other heads, which run there too, are not counted.
        assert by(fleet.orchestrator, "replica", "requests_in_flight") == {"0": 1, "1": 1}


async def test_waiting_and_running_requests_are_counted_everywhere() -> None:
    async with FakeFleet(replicas=2, replica_wait=60.0) as fleet:
        for name in "abcd":
            await fleet.submit(name, affinity=0 if name < "d" else 1)
        fleet.say("a")
        fleet.links[0].report(running=2)
        # The first replica runs two requests, and one waits; the other replica has not reported.
        assert by(fleet.orchestrator, "stage", "requests_waiting") == {"0": 2}
        assert by(fleet.orchestrator, "stage", "requests_running") == {"0": 2}
        for replica in (0, 1):
            fleet.kill(replica)
        fleet.orchestrator.metrics.held_before_accept = 7
        assert by(fleet.orchestrator, "stage", "requests_waiting") == {"0": 4 + 7}
        assert by(fleet.orchestrator, "stage", "requests_running") == {"0": 0}


async def test_the_expected_wait_is_the_queue_over_the_rate_at_which_it_shrinks() -> None:
    async with FakeFleet(replicas=1) as fleet:
        assert by(fleet.orchestrator, "stage", "expected_wait_seconds") == {"0": 0}
        for name in "abcde":
            await fleet.submit(name)
        assert by(fleet.orchestrator, "stage", "expected_wait_seconds") == {}
        fleet.now = 2.0
        fleet.say("a")
        assert by(fleet.orchestrator, "stage", "expected_wait_seconds") == {"0": 4 / (1 / 2.0)}
        for name in "bcde":
            fleet.say(name)
        assert by(fleet.orchestrator, "stage", "expected_wait_seconds") == {"0": 0}


async def test_kv_usage_of_a_stage_is_weighted_by_size_if_known() -> None:
    async with FakeFleet(replicas=0) as fleet:
        assert by(fleet.orchestrator, "stage", "stage_kv_cache_usage_ratio") == {}
        for replica_id, (blocks, running) in enumerate(((300, 40), (100, 80))):
            fleet.ready_response = b"[%d, 16]" % blocks
            fleet.join(fleet.pool.add(replica_id))
            await fleet.submit(str(replica_id), affinity=replica_id)
            fleet.links[replica_id].report(running)
        assert by(fleet.orchestrator, "stage", "stage_kv_cache_usage_ratio") == {"0": pytest.approx(0.5)}
        fleet.ready_response = b""
        fleet.join(fleet.pool.add(2))
        assert by(fleet.orchestrator, "stage", "stage_kv_cache_usage_ratio") == {"0": pytest.approx(0.4)}


async def test_the_hit_ratio_uses_prompts_with_reported_cached_tokens() -> None:
    async with FakeFleet(replicas=1) as fleet:
        assert by(fleet.orchestrator, "stage", "prefix_cache_hit_ratio") == {}
        for name, cached in (("a", 32), ("b", None)):
            await fleet.submit(name, prompt=[1] * 64)
            fleet.say(name, 1, cached=cached)
        assert by(fleet.orchestrator, "stage", "prefix_cache_hit_ratio") == {"0": 0.5}


async def test_a_replica_has_its_vllm_engine_number() -> None:
    stages = [stage(0, "thinker", "text"), stage(1, "talker", "tokens", "thinker", final=True)]
    async with FakePipelineFleet(stages) as fleet:
        assert by(fleet.orchestrator, "engine", "replica_info") == {"0": 1, "10000": 1}


async def test_a_lost_replica_is_told_apart_from_an_idle_one_whose_memory_is_empty_too() -> None:
    async with FakeFleet(replicas=2) as fleet:
        fleet.lose(1)
        assert by(fleet.orchestrator, "replica", "kv_cache_usage_ratio") == {"0": 0, "1": 0}
        assert by(fleet.orchestrator, "replica", "replica_info") == {"0": 1, "1": 0}


async def test_every_assignment_is_counted_once_by_reason() -> None:
    async with FakeFleet(replicas=2) as fleet:
        for name in "abc":
            await fleet.submit(name)
        await fleet.submit("bound", affinity=1)
        fleet.lose(0)
        reasons = by(fleet.orchestrator, "reason", "decisions_total")
        assert reasons["bound"] == 1
        assert sum(reasons.values()) == sum(by(fleet.orchestrator, "replica", "assignments_total").values())
        assert set(by(fleet.orchestrator, "policy", "decisions_total")) == {"LeastQueueLengthBalancer"}
        assert by(fleet.orchestrator, "fallback", "decision_fallbacks_total") == {}


def test_stage_times_have_labels_of_stage_and_part() -> None:
    orchestrator = empty_orchestrator()
    for part, seconds in (("queue", 0.5), ("run", 0.02), ("run", 2.0)):
        orchestrator.metrics.observe_stage(1, "talker", part, seconds)
    assert by(orchestrator, "part", "stage_seconds_count") == {"queue": 1, "run": 2}
    assert by(orchestrator, "part", "stage_seconds_sum") == {"queue": 0.5, "run": 2.02}
    assert value(orchestrator, "stage_seconds_bucket", stage="1", name="talker", part="run", le="0.03") == 1
