"""Prefill and decode whose engines do what public reports say of some.

They fetch a cache by place and number, without a look at the incarnation that made it (vllm#52234), and wait for ever
for an engine that does not answer (vllm#49238).
"""

import asyncio
import threading
from collections.abc import Container, Sequence
from itertools import count
from typing import Any

from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import DISAGGREGATED
from tests.fakes.stage_api import PlayedLink
from vllm_omni_plugin.orchestrator import PoolMember

PREFILL, DECODE = 0, 1
STAGES = PREFILL, DECODE
WRONG = 26
"""No engine answers with it otherwise."""
PROMPTS = {name: [number, 2, 3] for number, name in enumerate("abcd")}


class KvEngine(PlayedLink):
    """One incarnation of an engine at a place. `away`: it is dead, stopped or cut off, so nobody gets an answer."""

    def __init__(self, name: str, places: dict[str, "KvEngine"]) -> None:
        super().__init__(name)
        self.away = False
        self._places = places
        self._blocks: dict[int, list[int]] = {}
        self._numbers = count()
        self._given: dict[str, tuple[list[int], Any]] = {}
        self._wrong: set[str] = set()

    @property
    def caches(self) -> int:
        return len(self._blocks)

    def _add(self, body: dict[str, Any]) -> None:
        if body["abort_immediately"]:
            kv = body["sampling_params"]["kv"]
            self._places[kv["place"]]._blocks.pop(kv["number"])
            return
        super()._add(body)
        self._given[body["request_id"]] = body["prompt"], body["sampling_params"].get("kv")

    def compute_prompt(self, attempt: str) -> None:
        """Compute a prompt, and leave its cache here."""
        number = next(self._numbers)
        self._blocks[number], _ = self._given[attempt]
        del self.attempts[attempt]
        params = {"place": self.input_addr, "number": number}
        self.tell(attempt, 9, finish_reason="length", kv_transfer_params=params, cached=0)

    def forget(self) -> None:
        """Discard all caches; the next one gets the number of the first."""
        self._blocks, self._numbers = {}, count()

    def take_caches(self, other: "KvEngine") -> None:
        self._blocks, self._numbers = other._blocks, other._numbers

    def answer_on(self, attempt: str) -> None:
        """Send one more token. Before the first one the cache is fetched, if the request names one."""
        prompt, kv = self._given[attempt]
        if kv is not None:
            maker = self._places[kv["place"]]
            if maker.away:
                return
            if maker._blocks.pop(kv["number"], None) != prompt:
                self._wrong.add(attempt)
            self._given[attempt] = prompt, None
        if attempt in self._wrong:
            self.tell(attempt, WRONG)
        else:
            self.step(attempt)


class KvFleet(FakePipelineFleet):
    """Prefill and decode by such engines. A decode with a gate gets its input when that opens."""

    def __init__(self, replicas: int | Sequence[int] = 1, stall_timeout: float = 0.0) -> None:
        self.places: dict[str, KvEngine] = {}
        self.gates: dict[str, threading.Event] = {}
        super().__init__(DISAGGREGATED, replicas, migration_limit=9, replica_wait=600.0, stall_timeout=stall_timeout)
        build = self.apis[DECODE].build_root

        def build_root(source: Any, *arguments: Any, **more: Any) -> Any:
            if (gate := self.gates.get(source.request_id)) is not None:
                gate.wait(30)
            return build(source, *arguments, **more)

        self.apis[DECODE].build_root = build_root  # type: ignore[method-assign]

    def join(self, member: PoolMember) -> KvEngine:
        engine = KvEngine(f"replica-{member.name}", self.places)
        self.places[engine.input_addr] = self.links[member.stage_id, member.replica_id] = engine
        self.serve(member, engine, self.apis[member.stage_id], b"")
        return engine

    async def settle(self, blocked: Container[tuple[str, int]] = ()) -> None:
        await super().settle(blocked or {(name, DECODE) for name in self.gates})

    async def request(self, name: str) -> None:
        await self.submit(name, prompt=PROMPTS[name], move="replay")

    async def compute(self, name: str, *stages: int) -> None:
        """Let the engines of these stages do one step for a request, if they can."""
        for stage_id in stages or STAGES:
            if name in self.states and (name, stage_id) in self.at_work([name]):
                engine, attempt = self.attempt(name, stage_id)
                assert isinstance(engine, KvEngine)
                if not engine.away:
                    (engine.compute_prompt if stage_id == PREFILL else engine.answer_on)(attempt)
            # The head sends some requests again in its loop's next turn.
            await asyncio.sleep(0)
            await self.settle()

    def open_gates(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self.gates.clear()

    async def finish_all(self) -> None:
        """Let the engines do what they can; fails if a request hangs."""
        self.open_gates()
        for _ in range(30):
            for name in list(self.states):
                await self.compute(name)
        assert self.states == {}
        assert self.in_flight == 0

    def engine(self, stage_id: int, replica_id: int = 0) -> KvEngine:
        engine = self.links[stage_id, replica_id]
        assert isinstance(engine, KvEngine)
        return engine

    async def find_lost(self, stage_id: int, replica_id: int = 0) -> None:
        """The head finds out that a replica does not answer."""
        client = self.pools[stage_id].member(replica_id).client
        if client is not None:
            client.mark_dead("it does not answer")
        await self.settle()

    async def attach(self, stage_id: int, replica_id: int = 0, engine: KvEngine | None = None) -> None:
        """A replica serves again: another incarnation, or the same engine over a new link, with the same cache."""
        member = self.pools[stage_id].member(replica_id)
        if member.client is None:
            old, new = self.engine(stage_id, replica_id), self.join(member)
            if engine is old:
                new.take_caches(old)
        await self.settle()
