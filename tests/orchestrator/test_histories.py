"""Random histories of requests and replicas: every request ends once, with each token once, and no charge is left."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fakes.fleet import FakeFleet
from tests.fakes.links import FakeLink
from vllm_omni_plugin.admin.metrics.fleet_metrics import stage_numbers
from vllm_omni_plugin.admission import AdmissionConfig, RequestClass
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.orchestrator import OrchestratorRequestState
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits

from .late_fleet import LATE

REPLICAS = 3
CLASSES = (RequestClass(name="first", priority_at_most=0), RequestClass(name="last"))
NAMES = [f"r{number}" for number in range(10)]
ABORT_ONLY = "abort-only"
"""A request that its client has given up before it was submitted; whatever comes of it, nobody waits."""


class Histories(RuleBasedStateMachine):
    """The client's model of its requests beside the orchestrator's."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.open: set[str] = set()
        self.stale: list[tuple[FakeLink, str]] = []
        self.drained: dict[int, tuple[FakeLink, int]] = {}
        """Replicas that drain, and how many requests each had got before."""
        self.made: dict[str, int] = {}
        """Tokens that an engine has made of each attempt. The tokens of every answer are 0, 1, 2 ..."""

    @initialize(
        limit=st.integers(0, 3),
        seed=st.integers(0, 3),
        wait=st.sampled_from([0.0, 600.0]),
        late=st.booleans(),
        most=st.sampled_from([None, 1, 2]),
    )
    def begin(self, limit: int, seed: int, wait: float, late: bool, most: int | None) -> None:
        balancer = LeastQueueLengthBalancer(random.Random(seed))
        traits, plan = (
            LATE if late else PoolTraits(),
            AdmissionConfig(classes=CLASSES, max_waiting_requests=most),
        )
        self.fleet = FakeFleet(REPLICAS, balancer, limit, wait, traits=traits, plan=plan)
        self.run(self.fleet.__aenter__())

    def run(self, step: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(step)
        # A send that fails reports the loss in the next turn, and so may those that follow it.
        for _ in range(2 * REPLICAS):
            self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(self.read())

    async def read(self) -> None:
        for name, outcome in await self.fleet.read():
            if name == ABORT_ONLY:
                continue
            assert name in self.open, f"{name} got {outcome} after its end"
            if outcome is not None:
                self.open.remove(name)
        for name, tokens in self.fleet.tokens.items():
            assert tokens == list(range(len(tokens))), f"{name} got {tokens}"
        assert len(self.fleet.told_first) == len(set(self.fleet.told_first))

    async def do(self, link: FakeLink, *tokens: int, finish: str | None = None) -> None:
        link.output(*tokens, finish_reason=finish)

    @rule(
        names=st.sets(st.sampled_from(NAMES), min_size=1),
        affinity=st.sampled_from([None, None, 0, 1]),
        move=st.sampled_from(["resume", "replay", "replay", "never"]),
        priority=st.integers(0, 1),
    )
    def submit(self, names: set[str], affinity: int | None, move: str, priority: int = 0) -> None:
        self.remember_attempts()
        for name in sorted(names):
            self.open.add(name)
            self.fleet.tokens.pop(name, None)
            if name in self.fleet.told_first:
                self.fleet.told_first.remove(name)
            self.run(self.fleet.submit(name, affinity=affinity, move=move, priority=priority))

    @rule()
    def submit_for_the_abort_only(self) -> None:
        self.run(self.fleet.submit(ABORT_ONLY, abort_immediately=True))

    @precondition(lambda self: self.assigned())
    @rule(seed=st.integers(0, 1000))
    def advance(self, seed: int) -> None:
        """Engines make some tokens of all they have, and finish some."""
        self.remember_attempts()
        draw = random.Random(seed)
        for name in self.assigned():
            count, finish = draw.randint(0, 3), draw.choice([None] * 9 + ["stop", "length", "abort"])
            if count and name in self.assigned():
                self.output(name, count, finish)

    def output(self, name: str, count: int, finish: str | None) -> None:
        link, attempt = self.fleet.attempt(name)
        begin = self.made.get(attempt, len(link.prompts[attempt]))
        self.made[attempt] = begin + count
        if finish != "abort" and begin + count < len(self.fleet.tokens.get(name, [])):
            # An engine that repeats itself does not end before it did.
            finish = None
        self.run(self.do(link, attempt, *range(begin, begin + count), finish=finish))

    @precondition(lambda self: self.stale)
    @rule(data=st.data(), finish=st.sampled_from([None, "stop"]))
    def stale_output(self, data: st.DataObject, finish: str | None) -> None:
        link, attempt = data.draw(st.sampled_from(self.stale))
        if (link, attempt) not in self.current_attempts():
            self.run(self.do(link, attempt, 7, finish=finish))

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=3))
    def abort(self, names: list[str]) -> None:
        self.remember_attempts()
        self.open -= set(names)
        self.run(self.fleet.abort(*names))

    @rule(replica_id=st.integers(0, REPLICAS - 1), announced=st.booleans())
    def lose(self, replica_id: int, announced: bool) -> None:
        self.remember_attempts()
        if announced:
            self.run(self.announce(replica_id))
        else:
            self.fleet.links[replica_id].broken = True

    @rule()
    def lose_all(self) -> None:
        for replica_id in range(REPLICAS):
            self.lose(replica_id, announced=True)

    async def announce(self, replica_id: int) -> None:
        self.fleet.lose(replica_id)

    @rule(replica_id=st.integers(0, REPLICAS - 1), drains=st.booleans())
    def drain_or_resume(self, replica_id: int, drains: bool) -> None:
        self.remember_attempts()
        self.drained.pop(replica_id, None)
        self.run(self.cordon(replica_id, drains))
        if drains:
            link = self.fleet.links[replica_id]
            self.drained[replica_id] = link, len(link.added)

    async def cordon(self, replica_id: int, drains: bool) -> None:
        member, orchestrator = self.fleet.pool.member(replica_id), self.fleet.orchestrator
        (orchestrator.cordon if drains else orchestrator.uncordon)(member, ADMIN_CORDON)
        # What an abort has made room for is sent in a later turn of the loop.
        await asyncio.sleep(0)

    @rule(replica_id=st.integers(0, REPLICAS - 1))
    def join(self, replica_id: int) -> None:
        if self.fleet.pool.member(replica_id).client is None:
            self.run(self.rejoin(replica_id))

    async def rejoin(self, replica_id: int) -> None:
        self.fleet.join(self.fleet.pool.member(replica_id))

    def current_attempts(self) -> list[tuple[FakeLink, str]]:
        return [self.fleet.attempt(name) for name in self.assigned()]

    def assigned(self) -> list[str]:
        states = self.fleet.orchestrator.request_states if hasattr(self, "fleet") else {}
        return sorted(
            name for name, state in states.items() if state.runs[0].replica_id is not None and state.runs[0].sent
        )

    def remember_attempts(self) -> None:
        self.stale += [attempt for attempt in self.current_attempts() if attempt not in self.stale]

    @invariant()
    def the_charges_are_the_open_requests(self) -> None:
        if hasattr(self, "fleet"):
            assert set(self.fleet.orchestrator.request_states) == self.open
            metrics = self.fleet.orchestrator.metrics
            waiting = metrics.held + metrics.moves_waiting + metrics.queued
            assert sum(self.fleet.in_flight) + waiting == len(self.open)
            [(_, numbers)] = stage_numbers(self.fleet.orchestrator)
            assert numbers["requests_waiting"] + numbers["requests_running"] == len(self.open)
            assert metrics.held <= sum(map(self.has_nowhere_to_go, self.fleet.orchestrator.request_states.values()))
            assert not (metrics.moves_waiting and not self.fleet.pool.serving)

    def has_nowhere_to_go(self, state: OrchestratorRequestState) -> bool:
        serving = set(self.fleet.pool.serving)
        return not serving & (state.runs[0].confined_to or serving)

    @invariant()
    def nobody_waits_while_a_replica_has_nothing_to_begin(self) -> None:
        if hasattr(self, "fleet"):
            self.loop.run_until_complete(asyncio.sleep(0))
            metrics = self.fleet.orchestrator.metrics
            if not metrics.held and not metrics.moves_waiting:
                runs = [state.runs[0] for state in self.fleet.orchestrator.request_states.values()]
                waits = any(run.replica_id is None and run.affinity_key is None for run in runs)
                assert not waits or all(member.ledger.pending for member in self.fleet.pool.serving)

    @invariant()
    def a_replica_that_drains_gets_no_request(self) -> None:
        for replica_id, (link, added) in self.drained.items():
            now = self.fleet.links[replica_id]
            assert len(now.added) == (added if now is link else 0)

    @invariant()
    def lost_replicas_are_charged_with_nothing(self) -> None:
        if hasattr(self, "fleet"):
            idle = [member for member in self.fleet.pool.members if member.client is None]
            assert all(member.queue_length == 0 for member in idle)

    @invariant()
    def no_engine_sees_an_id_twice(self) -> None:
        if hasattr(self, "fleet"):
            added = [attempt for link in self.fleet.links.values() for attempt in link.added]
            assert len(added) == len(set(added))

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            for replica_id in range(REPLICAS):
                self.run(self.announce(replica_id))
            held, self.open = self.open, set()
            self.run(self.fleet.abort(*held))
            assert self.fleet.orchestrator.request_states == {}
            assert self.fleet.in_flight == [0] * REPLICAS
            named, other = self.fleet.orchestrator.admission.tenant_reports()
            assert all((tenant.waiting, tenant.in_flight) == ((0, 0), 0) for tenant in (*named.values(), other))
            self.run(self.fleet.__aexit__())
        self.loop.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("seed", range(60))
def test_long_histories_with_many_moves(seed: int) -> None:
    """Hypothesis finds short histories that fail; long ones, where requests move again and again, are drawn here."""
    draw = random.Random(seed)
    history = Histories()
    wait, most = draw.choice([0.0, 600.0]), draw.choice([None, 1, 2])
    history.begin(limit=3, seed=seed, wait=wait, late=draw.random() < 0.5, most=most)
    for _ in range(80):
        step = draw.choices(("submit", "advance", "lose", "join", "abort", "drain"), (6, 8, 1, 3, 1, 2))[0]
        names, replica_id = draw.sample(NAMES, 2), draw.randrange(REPLICAS)
        if step == "submit":
            history.submit(set(names) - history.open, None, draw.choice(["resume", "replay"]), draw.randrange(2))
        elif step == "advance":
            history.advance(draw.randrange(1000))
        elif step == "lose":
            history.lose(replica_id, announced=draw.random() < 0.5)
        elif step == "join":
            history.join(replica_id)
        elif step == "drain":
            history.drain_or_resume(replica_id, draw.random() < 0.5)
        else:
            history.abort(names[:1])
        history.the_charges_are_the_open_requests()
        history.a_replica_that_drains_gets_no_request()
        history.no_engine_sees_an_id_twice()
    history.teardown()
