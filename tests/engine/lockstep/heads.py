"""Heads as the ranks of a group see them, and subscribers of its coordinator."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from tests.engine.experts import RANKS
from tests.replicas.remote_head import attach_when_it_may
from tests.sim.protocol.requests import request
from vllm_omni_plugin.coordinator import ReplicaInfo
from vllm_omni_plugin.replicas.remote.remote_replica import AttachSettings, RemoteReplica, attach_remote
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

FINGERPRINT = {"model": "experts"}
_ANSWER_S = 20.0
_ids = itertools.count()


class FrontEnd:
    """A head as the ranks see it: attached to all of them over TCP."""

    def __init__(self, name: str) -> None:
        self.ranks: list[RemoteReplica] = []
        self._lost: set[int] = set()
        self._all_lost = asyncio.Event()
        self._name = name
        self._answers: dict[str, asyncio.Future[list[int]]] = {}
        self._tokens: dict[str, list[int]] = {}

    async def attach(self, infos: list[ReplicaInfo], context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        settings = AttachSettings(
            context=context,
            codecs={0: EngineApi()},
            head_id=self._name,
            fingerprints={0: FINGERPRINT},
            heartbeat_interval=0.5,
            heartbeat_timeout=30.0,
            secrets=None,
            clock=asyncio.get_running_loop().time,
        )
        self.detach()
        self.ranks = list(
            await asyncio.gather(*(self._attach(rank, info, settings) for rank, info in enumerate(infos)))
        )

    def detach(self) -> None:
        for replica in self.ranks:
            replica.close()
        self.ranks = []

    def send(self, rank: int, tokens: int = 4) -> "asyncio.Future[list[int]]":
        """Submit a request for an answer of so many tokens; these tokens."""
        request_id = f"request-{next(_ids)}"
        self._tokens[request_id] = []
        answer = self._answers[request_id] = asyncio.get_running_loop().create_future()
        self.ranks[rank].client.add_request(request(request_id, 8, max_tokens=tokens), request_id)
        return answer

    async def all_lost(self) -> None:
        """Return once every rank was reported dead."""
        async with asyncio.timeout(_ANSWER_S):
            await self._all_lost.wait()

    async def ask(self, rank: int, tokens: int = 4) -> list[int]:
        async with asyncio.timeout(_ANSWER_S):
            return await self.send(rank, tokens)

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all ranks at once, as a head does."""
        async with asyncio.timeout(_ANSWER_S):
            return list(await asyncio.gather(*(replica.client.call(method, *args) for replica in self.ranks)))

    async def _attach(self, rank: int, info: ReplicaInfo, settings: AttachSettings) -> RemoteReplica:
        replica = await attach_when_it_may(
            lambda: attach_remote(info, rank, settings, self._receive, lambda status: None)
        )
        replica.on_lost = lambda reason: self._lose(rank)
        return replica

    def _lose(self, rank: int) -> None:
        self._lost.add(rank)
        if len(self._lost) == RANKS:
            self._all_lost.set()

    def _receive(self, outputs: Any) -> None:
        for output in outputs.outputs:
            self._tokens[output.request_id] += output.new_token_ids
            answer = self._answers[output.request_id]
            if output.finish_reason is not None and not answer.done():
                answer.set_result(self._tokens[output.request_id])


class Publication(msgspec.Struct, array_like=True):
    """What vLLM's coordinator tells front ends.

    Attributes:
        counts: requests that wait, requests that run, and KV usage of each rank; None if it is about the wave alone.
        wave: which one runs, or is the next to run.
        running: whether one runs.
    """

    counts: list[tuple[int, int, float]] | None
    wave: int
    running: bool


class Waves:
    """Subscribes to a group's coordinator as vLLM's own front end does.

    Attributes:
        heard: what was published.
    """

    def __init__(self, address: str) -> None:
        self.heard: list[Publication] = []
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XSUB)
        self._socket.connect(address)
        self._changed = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    def of(cls, replica: RemoteReplica) -> Self:
        """Those of the group that a rank belongs to."""
        return cls(msgspec.msgpack.decode(replica.ready_response)["dp_stats_address"])

    async def until(self, condition: Callable[[Publication], bool]) -> Publication:
        """The next publication that fulfils a condition, from those not looked at yet on."""
        seen = len(self.heard)
        async with asyncio.timeout(_ANSWER_S):
            while True:
                for publication in self.heard[seen:]:
                    if condition(publication):
                        return publication
                seen = len(self.heard)
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        self._listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listening
        self._context.destroy(0)

    async def _listen(self) -> None:
        await self._socket.send(b"\x01")
        while True:
            self.heard.append(msgspec.msgpack.decode(await self._socket.recv(), type=Publication))
            self._changed.set()
