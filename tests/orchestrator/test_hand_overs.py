"""Kills, restarts, stops and cuts on either side of a hand-over: nothing is lost, no text is wrong, nothing hangs."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from tests.fakes.kv_fleet import DECODE, PREFILL, PROMPTS, STAGES, WRONG, KvFleet
from tests.fakes.links import FakeLink, answer_calls
from tests.fakes.stage_api import LEASE_S
from vllm_omni_plugin.coordinator import ReplicaStatus


async def undisturbed(name: str) -> list[int]:
    async with KvFleet() as fleet:
        await fleet.request(name)
        await fleet.finish_all()
        return fleet.tokens[name]


async def kill(fleet: KvFleet, stage_id: int) -> None:
    """It does not come back; another replica joins."""
    fleet.engine(stage_id).away = True
    await fleet.find_lost(stage_id)
    fleet.join(fleet.pools[stage_id].add())


async def restart(fleet: KvFleet, stage_id: int) -> None:
    """The new engine computes another prompt before anything else happens."""
    fleet.engine(stage_id).away = True
    await fleet.find_lost(stage_id)
    await fleet.attach(stage_id)
    await fleet.request("b")
    await fleet.compute("b", PREFILL)


async def stop(fleet: KvFleet, stage_id: int) -> None:
    """SIGSTOP, which the head finds out later, then SIGCONT: the engine goes on with what it had."""
    engine = fleet.engine(stage_id)
    engine.away = True
    await fleet.compute("a")
    await fleet.find_lost(stage_id)
    engine.away = False
    for attempt in list(engine.attempts):
        engine.tell(attempt, WRONG, finish_reason="stop", kv_transfer_params={"place": engine.input_addr, "number": 7})
    await fleet.attach(stage_id, engine=engine)


async def cut(fleet: KvFleet, stage_id: int) -> None:
    """Nobody reaches it for a while, though it runs."""
    engine = fleet.engine(stage_id)
    engine.away = engine.broken = True
    await fleet.compute("a")
    await fleet.find_lost(stage_id)
    await fleet.attach(stage_id, engine=engine)


async def sleep(fleet: KvFleet, stage_id: int) -> None:
    """Its memory is discarded, and after it woke up it computes another prompt."""
    engine = fleet.engine(stage_id)
    if not fleet.pools[stage_id].serving:
        return
    engine.on_call = answer_calls
    await fleet.call("sleep", 1, "keep", stages=(stage_id,))
    engine.forget()
    await fleet.call("wake_up", None, stages=(stage_id,))
    await fleet.request("b")
    await fleet.compute("b", PREFILL)


Event = Callable[[KvFleet, int], Awaitable[None]]


async def while_it_computes_the_prompt(fleet: KvFleet) -> None:
    await fleet.request("a")


async def while_the_input_of_the_decode_is_built(fleet: KvFleet) -> None:
    fleet.gates["a"] = threading.Event()
    await fleet.request("a")
    await fleet.compute("a", PREFILL)


async def while_no_decode_serves(fleet: KvFleet) -> None:
    await fleet.find_lost(DECODE)
    await fleet.request("a")
    await fleet.compute("a", PREFILL)


async def while_the_cache_is_fetched(fleet: KvFleet) -> None:
    await fleet.request("a")
    await fleet.compute("a", PREFILL)


async def while_it_answers(fleet: KvFleet) -> None:
    await while_the_cache_is_fetched(fleet)
    await fleet.compute("a", DECODE)


STEPS = [
    while_it_computes_the_prompt,
    while_the_input_of_the_decode_is_built,
    while_no_decode_serves,
    while_the_cache_is_fetched,
    while_it_answers,
]


async def test_a_cache_is_freed_if_the_client_leaves_before_a_decode_is_asked() -> None:
    async with KvFleet() as fleet:
        await while_the_input_of_the_decode_is_built(fleet)
        assert fleet.engine(PREFILL).caches == 1
        await fleet.abort("a")
        fleet.open_gates()
        await fleet.settle()
        assert (fleet.engine(PREFILL).caches, fleet.in_flight) == (0, 0)


async def test_a_cache_is_freed_if_the_client_has_left_when_its_prefill_ends() -> None:
    async with KvFleet() as fleet:
        await fleet.request("a")
        engine = fleet.engine(PREFILL)
        engine.pause_reading()
        await fleet.compute("a", PREFILL)
        await fleet.abort("a")
        assert engine.caches == 1
        engine.resume_reading()
        await fleet.settle()
        assert (engine.caches, fleet.in_flight) == (0, 0)


async def test_a_request_whose_wait_ends_while_a_cache_is_freed_fails() -> None:
    async with KvFleet() as fleet:
        await while_the_input_of_the_decode_is_built(fleet)
        await fleet.find_lost(DECODE)
        await fleet.request("b")
        await fleet.compute("b", PREFILL)
        await fleet.attach(DECODE)
        await fleet.find_lost(DECODE)
        fleet.now += 601.0
        await fleet.abort("a")
        fleet.open_gates()
        await fleet.settle()
        assert [name for name, _ in fleet.ends] == ["b"]


async def test_a_cache_that_no_decode_is_there_to_free_is_no_failed_request() -> None:
    async with KvFleet() as fleet:
        await while_no_decode_serves(fleet)
        await fleet.abort("a")
        assert not any(fleet.orchestrator.metrics.requests_failed.values())


async def test_a_cache_for_which_a_decode_was_asked_is_left_to_its_engine() -> None:
    async with KvFleet() as fleet:
        await while_the_cache_is_fetched(fleet)
        await fleet.abort("a")
        await fleet.settle()
        assert fleet.engine(PREFILL).caches == 1


@pytest.mark.parametrize("side", STAGES, ids=["prefill", "decode"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("event", [kill, restart, stop, cut, sleep])
async def test_an_answer_is_right_whatever_happens(event: Event, step: Any, side: int) -> None:
    async with KvFleet() as fleet:
        await step(fleet)
        await event(fleet, side)
        await fleet.attach(DECODE)
        await fleet.finish_all()
        assert fleet.tokens == {name: await undisturbed(name) for name in fleet.tokens}
        assert dict(fleet.ends) == dict.fromkeys(fleet.tokens, "stop")


@pytest.mark.parametrize("step", [each for each in STEPS if each is not while_it_computes_the_prompt])
async def test_a_prefill_that_has_drained_leaves_no_cache(step: Any) -> None:
    async with KvFleet() as fleet:
        await step(fleet)
        fleet.pools[PREFILL].lose(fleet.pools[PREFILL].member(0), ReplicaStatus.DRAINING)
        fleet.engine(PREFILL).away = True
        await fleet.attach(DECODE)
        await fleet.finish_all()
        assert fleet.tokens == {"a": await undisturbed("a")}


@pytest.mark.parametrize("whole", [False, True], ids=["AsyncLLM", "vLLM's Rust front end"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_client_that_leaves_stops_its_engine_and_no_further_stage_begins(step: Any, whole: bool) -> None:
    async with KvFleet() as fleet:
        await step(fleet)
        await fleet.abort("a", whole=whole)
        fleet.open_gates()
        await fleet.attach(DECODE)
        assert [fleet.engine(stage_id).attempts for stage_id in STAGES] == [{}, {}]
        assert (fleet.states, fleet.in_flight, fleet.ends) == ({}, 0, [])


async def test_a_decode_that_could_not_fetch_the_cache_computes_the_prompt() -> None:
    async with KvFleet() as fleet:
        await while_the_cache_is_fetched(fleet)
        fleet.tell("a", DECODE, finish_reason="error")
        await fleet.finish_all()
        assert fleet.tokens == {"a": await undisturbed("a")}
        assert ["kv" in request["sampling_params"] for request in fleet.engine(DECODE).requests] == [True, False]


async def test_a_decode_that_fails_without_a_cache_to_fetch_ends_its_request() -> None:
    async with KvFleet() as fleet:
        await while_the_cache_is_fetched(fleet)
        fleet.tell("a", DECODE, finish_reason="error")
        await eventually(lambda: len(fleet.engine(DECODE).requests) == 2, "another attempt")
        fleet.tell("a", DECODE, finish_reason="error")
        await fleet.settle()
        assert fleet.ends == [("a", "error")]


@pytest.mark.parametrize("step", [while_the_input_of_the_decode_is_built, while_no_decode_serves])
async def test_a_cache_that_its_maker_may_have_given_up_is_not_fetched(step: Any) -> None:
    async with KvFleet() as fleet:
        await step(fleet)
        fleet.now += LEASE_S + 1
        engine = fleet.engine(PREFILL)
        engine.forget()
        await fleet.request("b")
        await fleet.compute("b", PREFILL)
        await fleet.attach(DECODE)
        await fleet.finish_all()
        assert fleet.tokens == {name: await undisturbed(name) for name in "ab"}


@pytest.mark.parametrize(("late", "cached"), [(0, 0), (LEASE_S + 1, 3)])
async def test_cached_tokens_are_those_of_the_engine_that_has_computed_the_prompt(late: float, cached: int) -> None:
    async with KvFleet() as fleet:
        await while_no_decode_serves(fleet)
        fleet.now += late
        await fleet.attach(DECODE)
        fleet.tell("a", DECODE, 5, cached=3)
        await fleet.read()
        assert fleet.cached["a"] == [cached]


async def test_what_a_lost_prefill_has_stored_is_not_read() -> None:
    async with KvFleet() as fleet:
        await fleet.request("a")
        await fleet.find_lost(PREFILL)
        (request,) = fleet.engine(DECODE).requests
        assert request["sampling_params"]["cache"] is False


async def test_a_decode_that_waits_for_ever_for_a_cache_does_without_it_and_its_engine_has_not_stalled() -> None:
    async with KvFleet(stall_timeout=60.0) as fleet:
        await while_the_cache_is_fetched(fleet)
        # For decode only.
        fleet.engine(PREFILL).away = True
        for _ in range(130):
            fleet.now += 0.5
            fleet.orchestrator.tick()
        await eventually(lambda: len(fleet.engine(DECODE).requests) == 2, "another attempt")
        assert fleet.pools[DECODE].member(0).stalls == 0
        await fleet.finish_all()
        assert fleet.tokens == {"a": await undisturbed("a")}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The transfer parameters of all attempts of requests without a pipeline."""
    given: list[Any] = []
    send = FakeLink.send

    def noted(link: FakeLink, frames: Sequence[Any]) -> None:
        send(link, frames)
        if frames[0] == b"add":
            given.append(msgspec.json.decode(frames[1])["kv_transfer_params"])

    monkeypatch.setattr(FakeLink, "send", noted)
    return given


FETCHES: dict[str, Any] = {"do_remote_prefill": True}


@pytest.mark.parametrize(
    ("params", "again"), [(FETCHES, None), ({"do_remote_decode": True}, {"do_remote_decode": True})], ids=str
)
async def test_a_cache_that_a_client_names_is_fetched_by_one_attempt(
    params: dict[str, Any], again: Any, given: list[Any]
) -> None:
    async with FakeFleet() as fleet:
        await fleet.submit("a", kv_transfer_params=params)
        fleet.lose(fleet.home("a"))
        await eventually(lambda: len(given) == 2, "another attempt")
        assert given == [params, again]


@pytest.mark.parametrize(("waited", "named"), [(15.0, FETCHES), (15.1, None)])
async def test_a_cache_that_a_client_names_is_not_fetched_late(waited: float, named: Any, given: list[Any]) -> None:
    async with FakeFleet(replicas=0, replica_wait=60.0) as fleet:
        await fleet.submit("a", kv_transfer_params=FETCHES)
        fleet.now += waited
        fleet.join(fleet.pool.add())
        assert given == [named]


class Histories(RuleBasedStateMachine):
    """Any order of these, with several requests and two replicas of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    @initialize()
    def begin(self) -> None:
        self.expected = {name: self.run(undisturbed(name)) for name in PROMPTS}
        self.fleet = KvFleet(2)
        self.run(self.fleet.__aenter__())

    def run(self, step: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(step)

    @rule(name=st.sampled_from([*PROMPTS]), slow=st.booleans())
    def ask(self, name: str, slow: bool) -> None:
        if name not in self.fleet.states:
            self.fleet.tokens.pop(name, None)
            if slow and not self.fleet.gates:
                self.fleet.gates[name] = threading.Event()
            self.run(self.fleet.request(name))

    @rule()
    def build(self) -> None:
        self.fleet.open_gates()
        self.run(self.fleet.settle())

    @rule(name=st.sampled_from([*PROMPTS]))
    def compute(self, name: str) -> None:
        self.run(self.fleet.compute(name))
        assert self.fleet.tokens.get(name, []) == self.expected[name][: len(self.fleet.tokens.get(name, []))]

    @rule(stage_id=st.sampled_from(STAGES), replica_id=st.integers(0, 1))
    def goes_away(self, stage_id: int, replica_id: int) -> None:
        self.fleet.engine(stage_id, replica_id).away = True

    @rule(stage_id=st.sampled_from(STAGES), replica_id=st.integers(0, 1))
    def is_found_lost(self, stage_id: int, replica_id: int) -> None:
        self.run(self.fleet.find_lost(stage_id, replica_id))

    @rule(stage_id=st.sampled_from(STAGES), replica_id=st.integers(0, 1), anew=st.booleans())
    def comes_back(self, stage_id: int, replica_id: int, anew: bool) -> None:
        engine = self.fleet.engine(stage_id, replica_id)
        engine.away = False
        self.run(self.fleet.attach(stage_id, replica_id, None if anew else engine))

    @rule(name=st.sampled_from([*PROMPTS]))
    def leave(self, name: str) -> None:
        if name in self.fleet.gates:
            # It would keep a thread of the stage.
            self.build()
        self.run(self.fleet.abort(name))
        self.fleet.tokens.pop(name, None)

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            for stage_id in STAGES:
                for replica_id in range(2):
                    # One that is away is found out.
                    if self.fleet.engine(stage_id, replica_id).away:
                        self.is_found_lost(stage_id, replica_id)
                    self.run(self.fleet.attach(stage_id, replica_id))
            self.run(self.fleet.finish_all())
            assert all(tokens == self.expected[name] for name, tokens in self.fleet.tokens.items())
            self.run(self.fleet.__aexit__())
        self.loop.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=30)
