"""The state of the fleet as data."""

import pytest
from prometheus_client import CollectorRegistry, Counter

from tests.admin.asgi import app_of, client_of, view_of
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admin.watch.fleet_view import TokenRates
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.pipeline import VLLM_ENGINE, Modality, Pipeline, Stage
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize


async def test_the_state_has_heads_requests_and_replicas(fleet: FakeFleet) -> None:
    fleet.now = 10.0
    app = app_of(fleet)
    for number in range(3):
        await fleet.submit(f"r{number}")
    client_of_one = fleet.pool.member(0).client
    assert client_of_one is not None
    client_of_one.answered_at = 9.5
    fleet.pool.member(1).machines = ("10.0.0.1", "10.0.0.2")
    fleet.orchestrator.cordon(fleet.pool.member(1), "late")
    app.state.omni_drain.begin()
    async with client_of(app) as client:
        state = (await client.get("/omni/fleet")).json()
    assert state["head"] == {
        "name": "here",
        "vllm": "0",
        "plugin": "0",
        "state": "draining",
        "coordinator": None,
        "others": [],
    }
    assert state["requests"]["unfinished"] == 3
    first_one, second = state["stages"][0]["replicas"]
    assert first_one["requests"] + second["requests"] == 3
    assert (first_one["heartbeat_seconds"], second["heartbeat_seconds"]) == (0.5, None)
    assert (first_one["machines"], second["machines"]) == ([], ["10.0.0.1", "10.0.0.2"])
    assert (second["status"], second["cordons"]) == ("draining", ["late"])
    assert (second["tokens_per_second"], second["hit_rate"]) == (None, None)


async def test_requests_that_wait_in_the_admission_queue_are_queued() -> None:
    async with FakeFleet(
        replicas=1, traits=PoolTraits(waits_for_room=True), size=EngineSize(step_tokens=1000, sequences=1)
    ) as fleet:
        view = view_of(fleet)
        for number in range(9):
            await fleet.submit(f"r{number}")
        sent = len(fleet.links[0].added)
        assert sent < 9
        assert view.state()["requests"]["queued"] == 9 - sent


def test_refused_are_those_without_a_replica_and_those_of_admission(fleet: FakeFleet) -> None:
    metrics = fleet.orchestrator.metrics
    metrics.requests_failed["no_replica"], metrics.requests_failed_before_accept = 1, 2
    metrics.requests_refused[(0, "deadline", "503")] = metrics.requests_refused[(0, "in_flight", "429")] = 4
    metrics.requests_refused_before_accept[(0, "deadline", "503")] = 8
    assert view_of(fleet).state()["requests"]["refused"] == 1 + 2 + 4 + 4 + 8


async def test_a_viewer_leaves_the_loads_that_the_orchestrators_thread_keeps_alone(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(fleet)
    await fleet.submit("r0")
    monkeypatch.delattr(LoadLedger, "load")
    assert view.sample()["unfinished"] == 1
    assert sum(replica["requests"] for replica in view.state()["stages"][0]["replicas"]) == 1


def test_a_pipeline_is_a_graph_of_stages(fleet: FakeFleet) -> None:
    stages = (
        Stage(0, "writer", VLLM_ENGINE, Modality.TEXT, model="w", final=True),
        Stage(1, "refiner", VLLM_ENGINE, Modality.TEXT, model="r", inputs=("writer",), final=True),
    )
    view = view_of(fleet, pipeline=Pipeline(stages))
    (writer,) = view.state()["stages"]
    assert (writer["name"], writer["level"], writer["inputs"], writer["output"]) == ("writer", 0, [], "text")


def test_rates_are_those_of_vllms_counters() -> None:
    registry, now = CollectorRegistry(), 0.0
    labels = ("model_name", "engine")
    names = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
    counters = [Counter(f"vllm:{name}", "Help.", labels, registry=registry).labels("m", "10001") for name in names]
    rates = TokenRates(registry, lambda: now)
    assert rates.rates_of("1.1") == (None, None)
    rates.read()
    for counter, amount in zip(counters, (90, 10, 80, 20), strict=True):
        counter.inc(amount)
    now = 2.0
    rates.read()
    assert rates.rates_of("1.1") == (50.0, 0.25)
    assert rates.rates_of("0.0") == (None, None)
