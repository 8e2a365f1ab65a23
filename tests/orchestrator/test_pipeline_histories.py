"""Random histories of a pipeline: each request ends once, nothing stays charged, and no client gets a wrong token."""

import asyncio
import random
import threading
from collections.abc import Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import SPEECH
from vllm_omni_plugin.errors import NoReplicaError, RequestLostError

REPLICAS = 2
NAMES = [f"r{number}" for number in range(4)]
ASKED = [("text",), ("audio",), ("text", "audio")]

Got = dict[str, list[int]]


async def undisturbed(prompt: int, modalities: tuple[str, ...]) -> Got:
    """What a client gets when nothing happens."""
    async with FakePipelineFleet(SPEECH) as fleet:
        await fleet.submit("r", *modalities, outputs=["talker"], prompt=[prompt])
        await fleet.finish()
        return fleet.received("r")


class Histories(RuleBasedStateMachine):
    """The clients' model of their requests beside the orchestrator's."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.asked: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.expected: dict[tuple[int, tuple[str, ...]], Got] = {}
        self.gates: dict[str, threading.Event] = {}
        """The one that is closed, by the request whose transform waits for it. A stage has two threads."""

    @initialize(limit=st.integers(0, 3), wait=st.sampled_from([0.0, 600.0]))
    def begin(self, limit: int, wait: float) -> None:
        self.fleet = FakePipelineFleet(SPEECH, REPLICAS, limit, wait)
        self.run(self.fleet.__aenter__())

    def run(self, step: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(step)
        self.settle()
        self.check()

    def settle(self) -> None:
        self.loop.run_until_complete(self.fleet.settle({(name, 1) for name in self.gates}))

    def check(self) -> None:
        for name, (prompt, modalities) in list(self.asked.items()):
            so_far, whole, ends = (
                self.fleet.received(name),
                self.expected[prompt, modalities],
                self.fleet.call_ends(name),
            )
            for stage, tokens in so_far.items():
                assert tokens == whole[stage][: len(tokens)], (name, stage, tokens, whole)
            assert bool(ends) == (name not in self.fleet.states)
            if ends:
                (error,) = ends
                assert error is not None or {**whole, **so_far} == whole, (name, so_far, whole)
                assert error is None or isinstance(error, NoReplicaError | RequestLostError)
                del self.asked[name]

    @rule(name=st.sampled_from(NAMES), prompt=st.integers(0, 5), modalities=st.sampled_from(ASKED), slow=st.booleans())
    def submit(self, name: str, prompt: int, modalities: tuple[str, ...], slow: bool) -> None:
        self.open_gate(name)
        self.forget(name)
        gate = threading.Event()
        if slow and not self.gates:
            self.gates[name] = gate
        else:
            gate.set()
        if (prompt, modalities) not in self.expected:
            self.expected[prompt, modalities] = self.loop.run_until_complete(undisturbed(prompt, modalities))
        self.asked[name] = (prompt, modalities)
        submission = self.fleet.submit(
            name,
            *modalities,
            outputs=["talker"],
            prompt=[prompt],
            move="replay",
            params={"talker": lambda transfer: gate.wait(30) and None},
            settle=False,
        )
        self.run(submission)

    @rule(name=st.sampled_from(NAMES))
    def open_gate(self, name: str) -> None:
        if name in self.gates:
            self.gates.pop(name).set()
            self.settle()
            self.check()

    @precondition(lambda self: self.at_work())
    @rule(data=st.data(), count=st.integers(1, 3))
    def step(self, data: st.DataObject, count: int) -> None:
        name, stage_id = data.draw(st.sampled_from(self.at_work()))
        self.run(self.do(name, stage_id, count))

    async def do(self, name: str, stage_id: int, count: int) -> None:
        # One token at a time: where chunks end depends on nothing else then.
        for _ in range(count):
            if (name, stage_id) in self.fleet.at_work(list(self.fleet.states)):
                link, attempt = self.fleet.attempt(name, stage_id)
                link.step(attempt)
                await asyncio.sleep(0)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.forget(name)
        self.run(self.fleet.abort(name, whole=True))

    @rule(stage_id=st.integers(0, 2), replica_id=st.integers(0, REPLICAS - 1))
    def lose(self, stage_id: int, replica_id: int) -> None:
        self.run(self.announce(stage_id, replica_id))

    async def announce(self, stage_id: int, replica_id: int) -> None:
        self.fleet.lose(stage_id, replica_id)

    @rule(stage_id=st.integers(0, 2), replica_id=st.integers(0, REPLICAS - 1))
    def join(self, stage_id: int, replica_id: int) -> None:
        member = self.fleet.pools[stage_id].member(replica_id)
        if member not in self.fleet.pools[stage_id].serving:
            self.run(self.rejoin(stage_id, replica_id))

    async def rejoin(self, stage_id: int, replica_id: int) -> None:
        self.fleet.join(self.fleet.pools[stage_id].member(replica_id))

    @invariant()
    def nothing_is_charged_for_requests_that_have_ended(self) -> None:
        if hasattr(self, "fleet"):
            runs = [run for state in self.fleet.states.values() for run in state.runs.values() if not run.finished]
            metrics = self.fleet.orchestrator.metrics
            assert self.fleet.in_flight + metrics.held + metrics.moves_waiting == len(runs)

    def at_work(self) -> list[tuple[str, int]]:
        return sorted(self.fleet.at_work(list(self.fleet.states))) if hasattr(self, "fleet") else []

    def forget(self, name: str) -> None:
        """The client does not care any more what becomes of a request."""
        self.asked.pop(name, None)
        self.fleet.tokens.pop(name, None)

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            for name in NAMES:
                self.open_gate(name)
            for stage_id in range(3):
                for replica_id in range(REPLICAS):
                    self.join(stage_id, replica_id)
            self.run(self.fleet.finish())
            assert self.asked == {}
            assert self.fleet.in_flight == 0
            self.run(self.fleet.__aexit__())
        self.loop.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=30)


def test_long_histories() -> None:
    """Hypothesis finds short histories that fail; long ones, with many moves, are drawn here."""
    for seed in range(12):
        draw = random.Random(seed)
        history = Histories()
        history.begin(limit=9, wait=draw.choice([0.0, 600.0]))
        for _ in range(120):
            name, stage_id, replica_id = draw.choice(NAMES), draw.randrange(3), draw.randrange(REPLICAS)
            kind = draw.choices(("submit", "step", "gate", "lose", "join", "leave"), (3, 20, 3, 2, 3, 0.5))[0]
            if kind == "submit" and name not in history.asked:
                history.submit(name, draw.randrange(6), draw.choice(ASKED), draw.random() < 0.3)
            elif kind == "step" and (at_work := history.at_work()):
                history.run(history.do(*draw.choice(at_work), draw.randint(1, 3)))
            elif kind == "gate":
                history.open_gate(name)
            elif kind == "lose":
                history.lose(stage_id, replica_id)
            elif kind == "join":
                history.join(stage_id, replica_id)
            elif kind == "leave":
                history.leave(name)
            history.nothing_is_charged_for_requests_that_have_ended()
        history.teardown()
