"""Clients of a simulated week: what they ask, and whether each of them got what it asked for, once and in order."""

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.fakes.engine_api import VOCABULARY, FakeOutputs
from vllm_omni_plugin.admission import AdmissionConfig, RequestTerms
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator.front_end import QueuedFrontEnd
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import AbortRequests, RequestFailed, SubmitRequest
from week.played_engine import Request

ANSWERED, GIVEN_UP, REFUSED, FAILED = "answered", "given up", "refused", "failed"
_TURNS = 8
_GIVEN_UP = 0.05
_DAY_S, _DAYS = 86_400.0, 8


@dataclass(slots=True)
class _Asked:
    at: float
    length: int
    got: int = 0


class Clients:
    """All clients of a head, who know what the answers must be.

    Args:
        orchestrator: the head's.
        rng: draws what they ask.
        plan: of the head; None: they name no tenants, priorities and times.

    Attributes:
        sent: requests.
        ends: how they ended: `ANSWERED`, `GIVEN_UP`, `REFUSED` by admission or while no replica served, or `FAILED`.
        wrong: outputs that did not go on where the one before had ended, or that nobody waits for.
        examples: of what is not as it should be, the first few.
        open: requests that have not ended.
        waits: seconds to the first token, by day.
    """

    def __init__(self, orchestrator: Orchestrator, rng: random.Random, plan: AdmissionConfig | None = None) -> None:
        self._orchestrator = orchestrator
        assert isinstance(orchestrator.front_end, QueuedFrontEnd)
        self._front_end = orchestrator.front_end
        self._rng = rng
        self._tenants = None if plan is None else [*plan.tenants, "", "made up"]
        self._loop = asyncio.get_running_loop()
        self._sessions: list[tuple[str, list[int], int]] = [self._session(number) for number in range(64)]
        self._numbers = len(self._sessions)
        self._given_up: set[str] = set()
        self.sent = 0
        self.ends: Counter[str] = Counter()
        self.wrong = 0
        self.examples: list[str] = []
        self.open: dict[str, _Asked] = {}
        self.waits = [array("f") for _ in range(_DAYS)]

    def ask(self) -> None:
        """One of them sends a request, and may give it up some time later."""
        rng, name = self._rng, f"r{self.sent}"
        self.sent += 1
        length = min(400, max(1, round(rng.lognormvariate(3.6, 0.9))))
        terms = None if self._tenants is None else self._terms(self._tenants)
        session, prompt = None, [rng.randrange(VOCABULARY) for _ in range(rng.randint(16, 120))]
        if rng.random() < 0.5:
            session, prompt = self._next_turn()
        request = Request(
            request_id=name,
            prompt=prompt,
            length=length,
            session=session,
            move=rng.choice(("resume", "resume", "replay")),
            asked=len(prompt),
            priority=0 if terms is None else rng.randrange(2),
        )
        self.open[name] = _Asked(self._loop.time(), length)
        self._front_end.request_async_queue.force_put(SubmitRequest(request, self._loop.time(), terms=terms))
        if rng.random() < _GIVEN_UP:
            self._loop.call_later(rng.expovariate(1.0), self._give_up, name)

    async def read(self) -> None:
        """Take what the head says, for ever."""
        while True:
            for item in await self._front_end.output_async_queue.get_batch():
                if isinstance(item, RequestFailed):
                    self._failed(item)
                elif isinstance(item, FakeOutputs):
                    for output in item.outputs:
                        self._handle_output(output)

    def rest(self) -> None:
        """Nothing is on its way: what was given up before says nothing any more."""
        self._given_up.clear()

    def _handle_output(self, output: Any) -> None:
        asked = self.open.get(output.request_id)
        if asked is None:
            # What was on its way when it was given up.
            if output.request_id not in self._given_up:
                self._wrong(f"{output.request_id} got tokens after its end")
            return
        if not asked.got:
            day = min(_DAYS - 1, int(self._loop.time() / _DAY_S))
            self.waits[day].append(self._loop.time() - asked.at)
        tokens = output.new_token_ids
        if tokens != [place % VOCABULARY for place in range(asked.got, asked.got + len(tokens))]:
            self._wrong(f"{output.request_id} got {tokens[:3]}... after {asked.got} tokens")
        asked.got += len(tokens)
        if output.finish_reason is not None:
            if asked.got != asked.length:
                self._wrong(f"{output.request_id} got {asked.got} of {asked.length} tokens")
            self._end(output.request_id, ANSWERED)

    def _failed(self, item: RequestFailed) -> None:
        if item.request_id in self._given_up:
            return
        if item.request_id not in self.open:
            self._wrong(f"{item.request_id} failed after its end")
            return
        refused = isinstance(item.error, RequestRefusedError) or not self._orchestrator.can_serve
        if not refused:
            self._note(f"{item.request_id}: {item.error}")
        self._end(item.request_id, REFUSED if refused else FAILED)

    def _terms(self, tenants: Sequence[str]) -> RequestTerms:
        """Whose request it is, and how long it may wait; clients make up a thousand names."""
        tenant = self._rng.choice(tenants)
        if tenant == "made up":
            tenant = f"made-up-{self._rng.randrange(1000)}"
        return RequestTerms(tenant, self._rng.choice((None, None, None, self._rng.uniform(0.01, 3.0))))

    def _give_up(self, name: str) -> None:
        if name in self.open:
            self._given_up.add(name)
            self._end(name, GIVEN_UP)
            self._front_end.request_async_queue.force_put(AbortRequests((name,)))

    def _end(self, name: str, how: str) -> None:
        del self.open[name]
        self.ends[how] += 1

    def _next_turn(self) -> tuple[str, list[int]]:
        """The next question of a session, with all that was said in it before; after some turns it is another one."""
        place = self._rng.randrange(len(self._sessions))
        name, said, turn = self._sessions[place]
        prompt = said + [self._rng.randrange(VOCABULARY) for _ in range(20)]
        if turn == _TURNS:
            self._numbers += 1
            self._sessions[place] = self._session(self._numbers)
        else:
            self._sessions[place] = name, prompt, turn + 1
        return name, prompt

    def _session(self, number: int) -> tuple[str, list[int], int]:
        return f"session-{number}", [self._rng.randrange(VOCABULARY) for _ in range(48)], 1

    def _wrong(self, example: str) -> None:
        self.wrong += 1
        self._note(example)

    def _note(self, example: str) -> None:
        if len(self.examples) < 10:
            self.examples.append(example[:200])
