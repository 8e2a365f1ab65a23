"""The workloads. Rates are derived from the engines' service times, so that every profile is equally busy."""

import random
from array import array
from collections.abc import Iterator, Mapping
from itertools import islice

from simulator.requests import Session
from simulator.traffic import Requests, bursts, daily, length, poisson, tokens
from simulator.workload import Incident, MakeWorkload, Scale, Workload

_LONGEST_PROMPT = 12_000


def steady(scale: Scale, utilisation: float = 0.75) -> Workload:
    """Unrelated prompts of about 512 tokens and answers of about 128, arriving independently."""
    rng = random.Random(scale.seed)
    requests = Requests(rng)

    def sessions() -> Iterator[Session]:
        for start in islice(poisson(rng, scale.rate(utilisation, 512, 128)), scale.requests):
            prompt = tokens(rng, length(rng, 512, 0.5, 2048))
            yield Session(start, [requests.make(prompt, length(rng, 128, 0.5, 512), 512)])

    return Workload(sessions())


def bursty(scale: Scale) -> Workload:
    """Four times the mean rate for a fifth of the time, in bursts twice as long as a request (two seconds on the
    accelerator). Requests are short or long.
    """
    rng = random.Random(scale.seed)
    requests = Requests(rng)

    def sessions() -> Iterator[Session]:
        period_s = 8 * scale.alone_s(640, 112)
        times = bursts(rng, scale.rate(0.55, 640, 112), period_s, share=0.2, factor=4)
        for start in islice(times, scale.requests):
            prompt_mean, output_mean = (2000, 400) if rng.random() < 0.2 else (300, 40)
            prompt = tokens(rng, length(rng, prompt_mean, 0.4, 4096))
            yield Session(start, [requests.make(prompt, length(rng, output_mean, 0.4, 1024), 1024)])

    return Workload(sessions())


def heavy_tailed(scale: Scale) -> Workload:
    """Prompts and answers whose lengths differ by three orders of magnitude: means 700 and 150, log-normal."""
    rng = random.Random(scale.seed)
    requests = Requests(rng)

    def sessions() -> Iterator[Session]:
        for start in islice(poisson(rng, scale.rate(0.7, 700, 150)), scale.requests):
            prompt = tokens(rng, length(rng, 700, 1.4, _LONGEST_PROMPT))
            yield Session(start, [requests.make(prompt, length(rng, 150, 1.2, 3000), 3000)])

    return Workload(sessions())


def shared_system_prompt(scale: Scale) -> Workload:
    """Every prompt starts with the same 2,000 tokens and has 150 own ones: affinity alone would use one replica."""
    rng = random.Random(scale.seed)
    requests = Requests(rng)
    system = tokens(rng, 2000)

    def sessions() -> Iterator[Session]:
        for start in islice(poisson(rng, scale.rate(0.75, 150, 128)), scale.requests):
            prompt = system + tokens(rng, length(rng, 150, 0.6, 1000))
            yield Session(start, [requests.make(prompt, length(rng, 128, 0.5, 512), 512)])

    return Workload(sessions())


def multi_turn(scale: Scale) -> Workload:
    """Conversations of about six turns: 600 tokens at first, then answers of 150 and questions of 100. Pauses are about
    twice as long as an answer takes (three seconds on the accelerator).
    """
    rng = random.Random(scale.seed)
    return Workload(_conversations(scale, rng, utilisation=0.75))


def tenants(scale: Scale) -> Workload:
    """150 customers with a context of 6,000 tokens each and questions of 150 tokens: half of the capacity if all
    contexts are cached, five times the capacity if none is.
    """
    rng = random.Random(scale.seed)
    requests = Requests(rng)
    contexts = [tokens(rng, 6000) for _ in range(150)]

    def sessions() -> Iterator[Session]:
        for start in islice(poisson(rng, scale.rate(0.5, 150, 100)), scale.requests):
            tenant = rng.randrange(len(contexts))
            prompt = contexts[tenant] + tokens(rng, length(rng, 150, 0.5, 1000))
            yield Session(start, [requests.make(prompt, length(rng, 100, 0.5, 400), 400, f"tenant-{tenant}")])

    return Workload(sessions())


def long_contexts(scale: Scale) -> Workload:
    """Contexts of 1,000 tokens, and one in eight of 20,000, with questions of 150 tokens: a replica's KV memory holds
    three of the long ones. Of each there are as many as replicas.
    """
    rng = random.Random(scale.seed)
    requests = Requests(rng)
    contexts = [_context(rng, number) for number in range(8 * scale.replicas)]

    def sessions() -> Iterator[Session]:
        for start in islice(poisson(rng, scale.rate(0.5, 150, 150)), scale.requests):
            tenant = rng.randrange(len(contexts))
            prompt = contexts[tenant] + tokens(rng, length(rng, 150, 0.5, 1000))
            yield Session(start, [requests.make(prompt, length(rng, 150, 0.5, 600), 600, f"tenant-{tenant}")])

    return Workload(sessions())


def new_contexts(scale: Scale) -> Workload:
    """The lengths of `long-contexts`, no context twice."""
    rng = random.Random(scale.seed)
    requests = Requests(rng)

    def sessions() -> Iterator[Session]:
        for start in islice(poisson(rng, scale.rate(0.7, 3525, 400)), scale.requests):
            prompt = _context(rng, rng.randrange(8)) + tokens(rng, length(rng, 150, 0.5, 1000))
            yield Session(start, [requests.make(prompt, length(rng, 400, 0.7, 1500), 1500)])

    return Workload(sessions())


def _context(rng: random.Random, number: int) -> "array[int]":
    return tokens(rng, 1000 if number % 8 else 20_000)


def churn(scale: Scale) -> Workload:
    """The conversations of `multi-turn` while replicas die, leave and come back, one at a time."""
    rng = random.Random(scale.seed)
    rate = scale.rate(0.6, *_TURN)
    lasts = scale.requests / rate
    incidents = []
    for number in range(_INCIDENTS):
        at = lasts * (number + 0.5) / _INCIDENTS
        kind = rng.choice(("die", "leave"))
        incidents.append(
            Incident(at, kind, rng.randrange(scale.replicas), until=at + 0.8 * lasts / _INCIDENTS)  # type: ignore[arg-type]
        )
    return Workload(_conversations(scale, rng, utilisation=0.6), incidents)


def cold_joiners(scale: Scale) -> Workload:
    """Twelve contexts of 2,000 tokens that every replica caches. After a third of the time, a quarter of the replicas
    joins with empty caches. The others were nearly fully busy until then.
    """
    rng = random.Random(scale.seed)
    requests = Requests(rng)
    contexts = [tokens(rng, 2000) for _ in range(12)]
    rate = scale.rate(0.65, 150, 128)

    def sessions() -> Iterator[Session]:
        for start in islice(poisson(rng, rate), scale.requests):
            prompt = rng.choice(contexts) + tokens(rng, length(rng, 150, 0.6, 1000))
            yield Session(start, [requests.make(prompt, length(rng, 128, 0.5, 512), 512)])

    joiners = range(scale.replicas * 3 // 4, scale.replicas)
    return Workload(
        sessions(), [Incident(0.0, "leave", replica, until=scale.requests / rate / 3) for replica in joiners]
    )


def slow_replica(scale: Scale) -> Workload:
    """Fewer requests of `steady`, and one replica that is three times slower."""
    workload = steady(scale, utilisation=0.6)
    return Workload(workload.sessions, (Incident(0.0, "slow", 0, factor=3.0),))


def week(scale: Scale) -> Workload:
    """Seven days and nights: answers of about 2,000 tokens to prompts of 500. Every replica dies once."""
    rng = random.Random(scale.seed)
    requests = Requests(rng)

    def sessions() -> Iterator[Session]:
        for start in islice(daily(rng, scale.requests / _WEEK_S), scale.requests):
            prompt = tokens(rng, length(rng, 500, 0.6, 4000))
            yield Session(start, [requests.make(prompt, length(rng, 2000, 0.8, 8000), 8000)])

    deaths = [(rng.random() * _WEEK_S, replica) for replica in range(scale.replicas)]
    return Workload(sessions(), [Incident(at, "die", replica, until=at + 60) for at, replica in deaths])


_WEEK_S = 7 * 24 * 3600.0
_TURNS = 6
_TURN = (190, 150)
"""Mean prompt tokens without those of earlier turns, and mean output tokens."""
_INCIDENTS = 8


def _conversations(scale: Scale, rng: random.Random, utilisation: float) -> Iterator[Session]:
    requests = Requests(rng)
    times = poisson(rng, scale.rate(utilisation, *_TURN) / _TURNS)
    pause_s = 2 * scale.alone_s(*_TURN)
    for number, start in enumerate(islice(times, scale.requests // _TURNS)):
        session = Session(start, [])
        prompt: array[int] = tokens(rng, length(rng, 600, 0.6, 4000))
        for _ in range(1 + round(rng.expovariate(1 / (_TURNS - 1)))):
            turn = requests.make(prompt, length(rng, 150, 0.5, 600), 600, f"session-{number}")
            session.turns.append(turn)
            session.pauses.append(rng.expovariate(1 / pause_s))
            prompt = turn.tokens + tokens(rng, length(rng, 100, 0.5, 400))
            if len(prompt) > _LONGEST_PROMPT:
                break
        yield session


WORKLOADS: Mapping[str, MakeWorkload] = {
    "steady": steady,
    "bursty": bursty,
    "heavy-tailed": heavy_tailed,
    "shared-system-prompt": shared_system_prompt,
    "multi-turn": multi_turn,
    "tenants": tenants,
    "long-contexts": long_contexts,
    "new-contexts": new_contexts,
    "churn": churn,
    "cold-joiners": cold_joiners,
    "slow-replica": slow_replica,
    "week": week,
}
WEEK = "week"
"""Runs only on request: it shows the scale of the simulator rather than differences between policies."""
