"""Requests that crash engines in the middle of an answer: two engines at most, and other requests lose nothing."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.errors import QueryOfDeathError, RequestLostError
from vllm_omni_plugin.orchestrator import StagePool
from vllm_omni_plugin.orchestrator.dispatch.suspects import CLEARING_TOKENS

STEP_S = 0.02
LENGTH = 60
RESTART_S = 5.0

Deadly = Callable[[int, int], bool]
"""Whether an engine dies in a step: of a request that has so many tokens, so many of them computed by this engine."""


def at_once(tokens: int, here: int) -> bool:
    """It dies of what the request has become, so the next one at once."""
    return tokens >= 10


def after_a_while(tokens: int, here: int) -> bool:
    """It dies of how long the request has run there."""
    return here >= 10


class Engines:
    """Engines that compute one token of each of their requests in each step, and die of some requests.

    Args:
        fleet: where they are the replicas.
        deadly: how they die of which requests.
        length: tokens of each request.
        return_after: seconds after which an engine that has died is there again.

    Attributes:
        deaths: replicas whose engines have died, in order.
    """

    def __init__(
        self, fleet: FakeFleet, deadly: dict[str, Deadly], length: int = LENGTH, return_after: float = 1e9
    ) -> None:
        self.deaths: list[int] = []
        self._fleet = fleet
        self._deadly = deadly
        self._length = length
        self._return_after = return_after
        self._returns: list[tuple[float, int]] = []
        self._computed: Counter[str] = Counter()

    async def run(self, steps: int = 4000) -> dict[str, object]:
        """Let them compute until all requests have ended. Returns how each did."""
        fleet = self._fleet
        for _ in range(steps):
            await self.step()
            if not fleet.orchestrator.request_states:
                break
        return dict(event for event in fleet.events if event[1] is not None)

    async def step(self) -> None:
        """One step of each, and what is due at its end."""
        fleet = self._fleet
        fleet.now += STEP_S
        while self._returns and self._returns[0][0] <= fleet.now:
            fleet.join(fleet.pool.member(self._returns.pop(0)[1]))
        for member in list(fleet.pool.serving):
            self._compute(member.replica_id)
        fleet.orchestrator.tick()
        await fleet.read()

    def lose(self, replica_id: int) -> None:
        """An engine dies."""
        self.deaths.append(replica_id)
        self._returns.append((self._fleet.now + self._return_after, replica_id))
        self._fleet.lose(replica_id)

    def _compute(self, replica_id: int) -> None:
        link, in_flight = self._fleet.links[replica_id], self._fleet.pool.member(replica_id).in_flight
        attempts = list(in_flight.items())
        for attempt, run in attempts:
            deadly = self._deadly.get(run.request_id)
            if deadly is not None and deadly(self._tokens(link.prompts[attempt], attempt), self._computed[attempt]):
                self.lose(replica_id)
                return
        for attempt, _ in attempts:
            if attempt in in_flight:
                token = self._tokens(link.prompts[attempt], attempt)
                self._computed[attempt] += 1
                link.output(attempt, token, finish_reason="stop" if token + 1 == self._length else None)

    def _tokens(self, prompt: Sequence[int], attempt: str) -> int:
        return len(prompt) + self._computed[attempt]


def whole(fleet: FakeFleet, names: str) -> bool:
    """Whether these requests got all of their tokens, each once and in order."""
    return all(fleet.tokens.get(name) == list(range(LENGTH)) for name in names)


@pytest.mark.parametrize(
    ("deadly", "move", "replicas", "names", "limit"),
    [
        *[(at_once, move, replicas, "abcpdef", 3) for move in ("resume", "replay") for replicas in (2, 3, 4)],
        pytest.param(after_a_while, "resume", 4, "apb", 3, id="after a while, among few"),
        pytest.param(after_a_while, "resume", 3, "abcpdef", 3, id="after a while, among many"),
        pytest.param(after_a_while, "resume", 5, "abcpdef", 3, id="after a while, in a larger fleet"),
    ],
)
async def test_other_requests_on_its_engines_lose_nothing(
    deadly: Deadly, move: str, replicas: int, names: str, limit: int
) -> None:
    async with FakeFleet(replicas=replicas, migration_limit=limit, replica_wait=60.0) as fleet:
        engines = Engines(fleet, {"p": deadly}, return_after=RESTART_S)
        for name in names:
            await fleet.submit(name, affinity=0, move=move)
        ends = await engines.run()
        assert isinstance(ends.pop("p"), RequestLostError)
        others = names.replace("p", "")
        assert ends == dict.fromkeys(others, "stop")
        assert whole(fleet, others)
        # One of its two engines may die again until it is known which request it was.
        assert len(set(engines.deaths)) == 2


@pytest.mark.parametrize("replicas", [3, 4])
async def test_several_such_requests_at_once_kill_the_same_two_engines(replicas: int) -> None:
    async with FakeFleet(replicas=replicas, migration_limit=3, replica_wait=60.0) as fleet:
        engines = Engines(fleet, {"p": at_once, "q": at_once}, return_after=RESTART_S)
        for name in "apbqcd":
            await fleet.submit(name, affinity=0)
        ends = await engines.run()
        assert isinstance(ends.pop("p"), RequestLostError)
        assert isinstance(ends.pop("q"), RequestLostError)
        assert ends == dict.fromkeys("abcd", "stop")
        assert whole(fleet, "abcd")
        assert len(set(engines.deaths)) == 2


async def test_an_event_names_the_request_its_replicas_and_how_many_were_beside_it() -> None:
    async with FakeFleet(replicas=3, migration_limit=3) as fleet:
        engines = Engines(fleet, {"p": lambda tokens, here: tokens >= 2})
        for name in "ap":
            await fleet.submit(name, affinity=0)
        await engines.run()
        [event] = [event for event in fleet.orchestrator.events.after() if event.kind == "query_of_death"]
        first, second = engines.deaths
        assert f"replica 0.{first} with 1 others in flight" in event.reason
        assert f"replica 0.{second} with 0 others in flight" in event.reason
        assert event.reason.endswith("died under request p")


async def test_requests_common_to_two_crashes_get_no_third_replica_and_one_error_if_neither_comes_back() -> None:
    async with FakeFleet(replicas=3, replica_wait=0.0) as fleet:
        for name in "ab":
            await fleet.submit(name, affinity=0)
        fleet.lose(0)
        # Both have some tokens, and have come together by another loss.
        for name in "ab":
            for token in range(CLEARING_TOKENS):
                fleet.say(name, token)
        kept, other = map(fleet.home, "ab")
        fleet.kill(other)
        fleet.lose(kept)
        fleet.join(fleet.pool.member(other))
        ends = dict(event for event in await fleet.read() if event[1] is not None)
        assert {name: type(end) for name, end in ends.items()} == dict.fromkeys("ab", QueryOfDeathError)
        assert fleet.links[other].added == []
        assert fleet.orchestrator.metrics.requests_failed["query_of_death"] == 2


async def crash_twice(fleet: FakeFleet, late: str) -> tuple[int, int]:
    """Two replicas crash under all requests, replica 0 and the one that is returned; the last is still apart there.

    Args:
        fleet: of three replicas, with requests on replica 0.
        late: the one that is kept apart.

    Returns:
        The other replica that has crashed, and the third one, which serves.
    """
    fleet.lose(0)
    for name in fleet.orchestrator.request_states:
        for token in range(CLEARING_TOKENS if name != late else 0):
            fleet.say(name, token)
    third = fleet.home(late)
    fleet.kill(third)
    fleet.lose(3 - third)
    fleet.join(fleet.pool.member(third))
    return 3 - third, third


async def test_a_request_that_waited_in_vain_for_its_two_replicas_is_not_reported_as_the_culprit() -> None:
    async with FakeFleet(replicas=3, replica_wait=60.0) as fleet:
        for name in "pa":
            await fleet.submit(name, affinity=0)
        await crash_twice(fleet, late="a")
        fleet.now = 61.0
        fleet.orchestrator.tick()
        ended = [(name, type(error)) for name, error in await fleet.read() if error is not None]
        assert ended == [("a", QueryOfDeathError), ("p", QueryOfDeathError)]
        [event] = [event for event in fleet.orchestrator.events.after() if event.kind == "query_of_death"]
        assert event.reason.endswith("died under request a")


async def test_a_suspect_goes_to_another_machine_if_one_is_free() -> None:
    async with FakeFleet(replicas=3) as fleet:
        for member, host in zip(fleet.pool.members, "xxy", strict=True):
            member.remote, member.input_addr = True, f"tcp://{host}:1"
        await fleet.submit("a", affinity=0)
        fleet.lose(0)
        assert fleet.home("a") == 2


@pytest.mark.parametrize("others", [0, 1])
async def test_a_request_with_outputs_is_no_culprit_if_another_head_had_requests_there(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagePool, "others_at", lambda pool, member: others)
    async with FakeFleet(replicas=3, replica_wait=60.0, migration_limit=3) as fleet:
        await fleet.submit("a", affinity=0)
        fleet.say("a", 5)
        crashed = []
        for token in range(2):
            crashed.append(fleet.home("a"))
            fleet.lose(crashed[-1])
            if token == 0:
                fleet.say("a", 6)
        assert ("a" in fleet.orchestrator.request_states) is bool(others)
        if others:
            # It waits for one of the two that crashed.
            assert fleet.orchestrator.metrics.held == 1
            fleet.join(fleet.pool.member(crashed[1]))
            assert fleet.home("a") == crashed[1]
