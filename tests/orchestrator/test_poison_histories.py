"""Random histories of requests that engines die of: who was in flight at crashes of two replicas gets no third one."""

import random
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from tests.fakes.engine_api import REFUSED
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.orchestrator import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits

from .late_fleet import LATE

STEP_S = 0.1
NEVER_S = 1e9
REPLICA_WAIT_S = 12.0


@dataclass
class History:
    """A stage whose engines compute a token of each request in each step; one or more heads send them requests.

    Args:
        seed: of all that is drawn.
        poisonous: how many of the requests are such that an engine dies of them, each time after as many tokens as is
            drawn then.

    Attributes:
        crashed: the replicas that have crashed with a request in flight, by its name. One that takes the id of another
            is not the same.
        ends: what each request has ended with.
    """

    seed: int
    poisonous: int
    crashed: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    ends: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = self._draw = random.Random(self.seed)
        self._replicas = draw.randint(2, 5)
        self._restart_s = draw.choice([0.1, 1.0, 10.0, NEVER_S])
        self._length = draw.choice([8, 30])
        self._traits = draw.choice([PoolTraits(), LATE])
        self._move = draw.choice(["resume", "replay"])
        # Where no engine crashes by itself, others are killed or drained, which ends nobody.
        self._disturbed = draw.random() < 0.5
        self._names = [f"p{number}" for number in range(self.poisonous)]
        self._names += [f"r{number}" for number in range(draw.randint(1, 12))]
        draw.shuffle(self._names)
        self._hurry = draw.random() < 0.5
        self._heads: list[FakeFleet] = []
        self._returns: dict[int, float] = {}
        self._replaced: dict[int, int] = defaultdict(int)
        self._said: dict[str, int] = defaultdict(int)
        self._deadly_at: dict[str, int] = {}

    async def run(self) -> None:
        """Until all requests have ended."""
        draw = self._draw
        async with AsyncExitStack() as stack:
            for _ in range(draw.randint(1, 3)):
                balancer = LeastQueueLengthBalancer(draw)
                fleet = FakeFleet(self._replicas, balancer, 100, REPLICA_WAIT_S, traits=self._traits)
                self._heads.append(await stack.enter_async_context(fleet))
            for _ in range(10_000):
                await self._step()
                if not self._names and not any(fleet.orchestrator.request_states for fleet in self._heads):
                    self._check_answers()
                    return
            raise AssertionError("requests do not end")

    def _check_answers(self) -> None:
        """Every answer is whole, whatever has happened on the way."""
        for fleet in self._heads:
            answered = [name for name in fleet.tokens if self.ends[name] == "stop"]
            assert [fleet.tokens[name] for name in answered] == [[*range(self._length)]] * len(answered)

    def others_at(self, pool: StagePool, member: PoolMember) -> int:
        """As far as heads know of each other, which is exact here."""
        others = [fleet.pool.member(member.replica_id) for fleet in self._heads if fleet.pool is not pool]
        return sum(run.sent for other in others for run in other.in_flight.values())

    async def _step(self) -> None:
        draw = self._draw
        while self._names and (self._hurry or draw.random() < 0.3):
            fleet = draw.choice(self._heads)
            await fleet.submit(self._names.pop(), move=self._move)
        for fleet in self._heads:
            fleet.now += STEP_S
        if self._disturbed and draw.random() < 0.03:
            self._disturb(draw.randrange(self._replicas))
        for replica_id, at in [*self._returns.items()]:
            if at <= self._heads[0].now:
                self._start(replica_id)
        for replica_id in range(self._replicas):
            if replica_id not in self._returns:
                self._compute(replica_id)
        for fleet in self._heads:
            fleet.orchestrator.tick()
            self.ends |= {name: end for name, end in await fleet.read() if end is not None}

    def _start(self, replica_id: int) -> None:
        """An engine is there again, or the one of another replica that has got the id."""
        del self._returns[replica_id]
        replaced = self._draw.random() < 0.2
        self._replaced[replica_id] += replaced
        for fleet in self._heads:
            if replaced:
                fleet.orchestrator.replica_left(fleet.pool.member(replica_id))
                fleet.pool.add(replica_id)
            fleet.join(fleet.pool.member(replica_id))

    def _disturb(self, replica_id: int) -> None:
        if replica_id in self._returns:
            return
        if self._draw.random() < 0.5:
            self._returns[replica_id] = self._heads[0].now + 1.0
            for fleet in self._heads:
                fleet.kill(replica_id)
        else:
            fleet = self._draw.choice(self._heads)
            fleet.orchestrator.cordon(fleet.pool.member(replica_id), ADMIN_CORDON)
            fleet.orchestrator.uncordon(fleet.pool.member(replica_id), ADMIN_CORDON)

    def _compute(self, replica_id: int) -> None:
        running = [
            (fleet, attempt, run.request_id)
            for fleet in self._heads
            for attempt, run in fleet.pool.member(replica_id).in_flight.items()
            if run.sent
        ]
        for _, attempt, name in running:
            if name.startswith("p"):
                deadly_at = self._deadly_at.setdefault(attempt, self._draw.choice([0, 0, 1, 3, 4, 5, 7]))
                if self._said[attempt] >= deadly_at:
                    self._crash(replica_id, {name for _, _, name in running})
                    return
        for fleet, attempt, _ in running:
            if attempt not in fleet.pool.member(replica_id).in_flight:
                continue
            link = fleet.links[replica_id]
            if self._disturbed and not self._said[attempt] and self._draw.random() < 0.02:
                link.output(attempt, finish_reason=REFUSED)
                continue
            token = len(link.prompts[attempt]) + self._said[attempt]
            self._said[attempt] += 1
            link.output(attempt, token, finish_reason="stop" if token + 1 == self._length else None)

    def _crash(self, replica_id: int, names: set[str]) -> None:
        self._returns[replica_id] = self._heads[0].now + self._restart_s
        for name in names:
            self.crashed[name].add((replica_id, self._replaced[replica_id]))
        for fleet in self._draw.sample(self._heads, len(self._heads)):
            fleet.lose(replica_id)


async def played(seed: int, poisonous: int, monkeypatch: pytest.MonkeyPatch) -> History:
    history = History(seed, poisonous)
    monkeypatch.setattr(StagePool, "others_at", lambda pool, member: history.others_at(pool, member))
    await history.run()
    return history


@pytest.mark.parametrize("seed", range(40))
async def test_no_request_is_in_flight_where_a_third_replica_crashes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = await played(seed, 1 + seed % 2, monkeypatch)
    assert {name: where for name, where in history.crashed.items() if len(where) > 2} == {}


@pytest.mark.parametrize("seed", range(10))
async def test_where_no_engine_crashes_nobody_is_ended(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    history = await played(seed, 0, monkeypatch)
    # What all refuse goes back to its client.
    assert set(history.ends.values()) <= {"stop", REFUSED}
