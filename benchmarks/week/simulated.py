"""Runs a head through days of bursts, rests and faults, and looks at what is left of them at every rest."""

import asyncio
import gc
import random
import statistics
import sys
from array import array
from collections import Counter
from dataclasses import dataclass, field
from math import sin, tau

from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.balancing import LoadBalancer
from week.clients import Clients
from week.head import Head
from week.virtual_time import VirtualTimeLoop

DAY_S = 86_400.0
PERIOD_S = 150.0
"""From one burst to the next one."""
_BURST_S = 3.0
_LOOKS_S = (1.0, 2.0, 3.0)
"""After a burst begins."""
_BUSY = 2
"""Requests for each replica, at least, where the evenness of those in flight is looked at."""
_SIZES_EVERY = 24
"""Rests: once an hour."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is simulated.

    Attributes:
        days: how long.
        requests: about how many in each burst, on average over a day.
        replicas: when all are there.
        fault: with which probability something befalls replicas in a burst.
        seed: of everything that is drawn.
        plan: see `Head`; with one, requests have tenants, priorities and times.
    """

    days: float = 7.0
    requests: int = 50
    replicas: int = 12
    fault: float = 0.25
    seed: int = 0
    plan: AdmissionConfig | None = None


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        sent: see `Clients`, as of `ends`, `wrong`, `examples` and `waits`.
        moves: of requests whose replica was lost.
        recalls: of requests that waited for another replica.
        happened: see `Head`.
        rests: at which was looked for what was left.
        left: the most that was found at any rest, by where; without what is 0, as everything should be.
        hours: when each burst began.
        in_flight: coefficient of variation over the replicas that serve, mean of the looks at a burst; -1 where there
            was too little to do.
        dispatched: of requests sent in a burst to those that served all the time; likewise.
        sized: hours at which the size of the process was looked at.
        mib: memory of all its objects that can hold others, which tables are made of, without these arrays.
        objects: how many these are.
    """

    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    examples: list[str] = field(default_factory=list)
    waits: "list[array[float]]" = field(default_factory=list)
    moves: int = 0
    recalls: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    rests: int = 0
    left: dict[str, float] = field(default_factory=dict)
    # In arrays, each of which is one object: what is measured must not grow by being measured.
    hours: "array[float]" = field(default_factory=lambda: array("d"))
    in_flight: "array[float]" = field(default_factory=lambda: array("d"))
    dispatched: "array[float]" = field(default_factory=lambda: array("d"))
    sized: "array[float]" = field(default_factory=lambda: array("d"))
    mib: "array[float]" = field(default_factory=lambda: array("d"))
    objects: "array[float]" = field(default_factory=lambda: array("d"))


def simulate(policy: LoadBalancer, name: str, settings: Settings) -> Outcome:
    """Run it. The same settings give the same outcome, but for sizes."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_Week(policy, name, settings).run())


class _Week:
    def __init__(self, policy: LoadBalancer, name: str, settings: Settings) -> None:
        self._policy = policy
        self._name = name
        self._settings = settings
        self._rng = random.Random(settings.seed)
        self._outcome = Outcome()
        self._looks: list[float] = []

    async def run(self) -> Outcome:
        loop, settings, outcome = asyncio.get_running_loop(), self._settings, self._outcome
        # What goes wrong in a callback must not pass for a good end.
        errors: list[object] = []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        async with Head(self._policy, self._name, settings.replicas, self._rng, settings.plan) as head:
            clients = Clients(head.orchestrator, self._rng, settings.plan)
            reading = loop.create_task(clients.read())
            for number in range(int(settings.days * DAY_S / PERIOD_S)):
                await self._burst(head, clients)
                if not clients.open:
                    self._rest(head, clients)
                    if number % _SIZES_EVERY == 0:
                        self._size(loop.time() / 3600, clients)
                if errors:
                    raise RuntimeError(f"in a callback: {errors[0]}")
            await head.settle()
            await asyncio.sleep(PERIOD_S)
            self._rest(head, clients)
            reading.cancel()
            await asyncio.wait([reading])
            outcome.sent, outcome.ends, outcome.wrong = clients.sent, clients.ends, clients.wrong
            outcome.examples, outcome.waits = clients.examples, clients.waits
            outcome.moves, outcome.happened = head.orchestrator.metrics.moves, head.happened
            outcome.recalls = head.orchestrator.metrics.requests_recalled
        return outcome

    async def _burst(self, head: Head, clients: Clients) -> None:
        """Requests that come almost at once, a few that follow, and a rest."""
        loop, rng, outcome = asyncio.get_running_loop(), self._rng, self._outcome
        began, before = loop.time(), {member: member.dispatches for member in head.pool.serving}
        mean = self._settings.requests * (1 + 0.8 * sin(tau * began / DAY_S))
        count = max(1, min(20 * self._settings.requests, round(rng.expovariate(1 / mean))))
        for _ in range(count):
            loop.call_later(rng.uniform(0, _BURST_S), clients.ask)
        for _ in range(rng.randrange(4)):
            loop.call_later(rng.uniform(_BURST_S, PERIOD_S / 3), clients.ask)
        if rng.random() < self._settings.fault:
            loop.call_later(rng.uniform(0, 2 * _BURST_S), head.befall)
        self._looks.clear()
        for after in _LOOKS_S:
            loop.call_later(after, self._look, head)
        await asyncio.sleep(PERIOD_S)
        outcome.hours.append(began / 3600)
        outcome.in_flight.append(statistics.mean(self._looks) if self._looks else -1.0)
        sent = [member.dispatches - before[member] for member in head.pool.serving if member in before]
        outcome.dispatched.append(_variation(sent) if sum(sent) >= _BUSY * len(sent) > _BUSY else -1.0)

    def _look(self, head: Head) -> None:
        loads = [member.queue_length for member in head.pool.serving]
        if sum(loads) >= _BUSY * len(loads) > _BUSY:
            self._looks.append(_variation(loads))

    def _rest(self, head: Head, clients: Clients) -> None:
        outcome = self._outcome
        clients.rest()
        outcome.rests += 1
        found: Counter[str] = Counter()
        for where, amount in (*head.left(), ("sent twice to an engine", head.refused_twice)):
            found[where] += abs(amount)  # type: ignore[assignment]
        for where, amount in found.items():
            if amount:
                outcome.left[where] = max(outcome.left.get(where, 0), amount)

    def _size(self, hours: float, clients: Clients) -> None:
        gc.collect()
        objects, outcome = gc.get_objects(), self._outcome
        measured = (*clients.waits, outcome.hours, outcome.in_flight, outcome.dispatched)
        measured += (outcome.sized, outcome.mib, outcome.objects)
        outcome.sized.append(hours)
        outcome.mib.append((sum(map(sys.getsizeof, objects)) - sum(map(sys.getsizeof, measured))) / 1024**2)
        outcome.objects.append(len(objects))


def _variation(counts: list[int]) -> float:
    mean = statistics.mean(counts)
    return statistics.pstdev(counts) / mean if mean else 0.0
