"""Several heads of one fleet whose messages to each other are passed on by the test."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from tests.fakes.links import FakeLink, answer_calls
from vllm_omni_plugin.coordinator import PeerAnswer, PeerCall
from vllm_omni_plugin.orchestrator.messages import CallReplicas, ManageReplica
from vllm_omni_plugin.orchestrator.peer_calls import PeerCalls
from vllm_omni_plugin.orchestrator.told_elsewhere import ToldElsewhere
from vllm_omni_plugin.vllm_api.adapter import Adapter

SILENT = "did not answer in time"


class HeadBus:
    """Satisfies what the coordinator does for heads. Messages arrive in the order in which they were sent.

    Attributes:
        deaf: heads that get nothing, and are said not to answer.
        sent: method and arguments of all calls, in order.
        holding: whether messages wait for `deliver`.
    """

    def __init__(self) -> None:
        self.seats: dict[str, Seat] = {}
        self.deaf: set[str] = set()
        self.sent: list[tuple[str, Any]] = []
        self.holding = False
        self._waiting: deque[Callable[[], None]] = deque()

    def pass_on(self, deliver: Callable[[], None]) -> None:
        self._waiting.append(deliver)
        if not self.holding:
            asyncio.get_running_loop().call_soon(self.deliver)

    def deliver(self, count: int = 1) -> None:
        """Pass the oldest messages on."""
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft()()

    def release(self) -> None:
        """Hold nothing back any more."""
        self.holding = False
        self.deliver(len(self._waiting))

    def leave(self, head_id: str) -> None:
        """A head is gone, and the others hear of it."""
        self.seats.pop(head_id).vacate()
        for seat in self.seats.values():
            seat.peers.peers_lost((head_id,))


class Seat:
    """Satisfies `PeerLink`."""

    def __init__(self, bus: HeadBus, head_id: str) -> None:
        self.head_id = head_id
        self.peers: PeerCalls
        self._bus = bus
        self._asked: dict[int, tuple[Future[list[PeerAnswer]], dict[str, PeerAnswer | None]]] = {}

    def call(self, method: str, arguments: Any, timeout: float) -> Future[list[PeerAnswer]]:
        call = PeerCall(self.head_id, len(self._bus.sent), method, msgspec.json.decode(msgspec.json.encode(arguments)))
        self._bus.sent.append((method, call.arguments))
        others = [seat for seat in self._bus.seats.values() if seat is not self]
        answers: dict[str, PeerAnswer | None] = dict.fromkeys(seat.head_id for seat in others)
        reply: Future[list[PeerAnswer]] = Future()
        self._asked[call.call_id] = (reply, answers)
        for seat in others:
            if seat.head_id in self._bus.deaf or self.head_id in self._bus.deaf:
                self._bus.pass_on(lambda seat=seat: self.answered(call, PeerAnswer(seat.head_id, error=SILENT)))  # type: ignore[misc]
            else:
                self._bus.pass_on(lambda seat=seat: seat.arrive(call))  # type: ignore[misc]
        self._resolve(call.call_id)
        return reply

    def answer(self, call: PeerCall, result: Any = None, error: str = "") -> None:
        asker = self._bus.seats.get(call.head_id)
        if asker is not None:
            answer = PeerAnswer(self.head_id, msgspec.json.decode(msgspec.json.encode(result)), error)
            self._bus.pass_on(lambda: asker.answered(call, answer))

    def arrive(self, call: PeerCall) -> None:
        if self._bus.seats.get(self.head_id) is self:
            self.peers.called(call)
        elif call.head_id in self._bus.seats:
            self._bus.seats[call.head_id].answered(call, PeerAnswer(self.head_id, error="has left"))

    def answered(self, call: PeerCall, answer: PeerAnswer) -> None:
        if call.call_id in self._asked:
            self._asked[call.call_id][1].setdefault(answer.head_id)
            self._asked[call.call_id][1][answer.head_id] = answer
            self._resolve(call.call_id)

    def vacate(self) -> None:
        """The head is gone: who waits for it is told so."""
        for seat in self._bus.seats.values():
            seat.gone(self.head_id)

    def gone(self, head_id: str) -> None:
        for call_id, (_, answers) in list(self._asked.items()):
            if head_id in answers and answers[head_id] is None:
                answers[head_id] = PeerAnswer(head_id, error="has left")
                self._resolve(call_id)

    def _resolve(self, call_id: int) -> None:
        reply, answers = self._asked[call_id]
        if None not in answers.values():
            del self._asked[call_id]
            if reply.set_running_or_notify_cancel():
                reply.set_result([answer for answer in answers.values() if answer is not None])


class FakeHead(FakeFleet):
    """A head with a seat at the bus. Its replicas have the same addresses as those of the other heads.

    Attributes:
        seat: None before it has one.
        adapters: what requests may ask for, by name, as AsyncLLM's side was told.
        sleep_level: how deep the engines sleep, as it was told.
        may_remind: attempts to reach silent heads wait for it.
    """

    def __init__(self, bus: HeadBus, head_id: str, replicas: int = 2) -> None:
        super().__init__(replicas)
        for replica_id, link in self.links.items():
            self._share(replica_id, link)
        self.bus, self.head_id = bus, head_id
        self.seat: Seat | None = None
        self.adapters: dict[str, Adapter] = {}
        self.sleep_level = 0
        self.may_remind = asyncio.Event()
        self.peers = PeerCalls(self.orchestrator, head_id, lambda: self.seat, self._delay)
        self.orchestrator.peer_calls = self.peers
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "FakeHead":
        await super().__aenter__()
        self._reader = asyncio.create_task(self._read_front())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()
        await super().__aexit__()
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def take_seat(self) -> None:
        """Take a seat at the bus; returns when this head knows what the others do."""
        self.connect()
        async with asyncio.timeout(10):
            await self.peers.synchronised()

    def connect(self) -> None:
        seat = self.seat = self.bus.seats[self.head_id] = Seat(self.bus, self.head_id)
        seat.peers = self.peers
        self.peers.synchronise()

    def leave(self) -> None:
        if self.seat is not None and self.bus.seats.get(self.head_id) is self.seat:
            self.bus.leave(self.head_id)
        self.seat = None

    def attach(self, replica_id: int, private: bool = False) -> FakeLink:
        """This head reaches a replica from now on."""
        link = self.join(self.pool.add(replica_id))
        self._share(replica_id, link)
        self.pool.member(replica_id).remote = not private
        return link

    def send(self, method: str, *args: Any) -> Future[list[Any]]:
        reply: Future[list[Any]] = Future()
        self.orchestrator.rpc_async_queue.force_put(CallReplicas(method, args, reply))
        return reply

    async def call(self, method: str, *args: Any) -> list[Any]:
        async with asyncio.timeout(10):
            return await asyncio.wrap_future(self.send(method, *args))

    async def manage(self, action: Any, replica_id: int) -> None:
        reply: Future[None] = Future()
        self.orchestrator.rpc_async_queue.force_put(ManageReplica(action, 0, replica_id, reply))
        async with asyncio.timeout(10):
            await asyncio.wrap_future(reply)

    def calls(self, replica_id: int) -> list[tuple[str, list[Any]]]:
        """What this head told a replica."""
        return [(method, args) for _, method, args in self.links[replica_id].calls]

    @property
    def replay(self) -> list[tuple[str, tuple[Any, ...]]]:
        """What this head tells a replica that attaches."""
        return self.orchestrator.fan_out.stages[0].shared.replay()

    async def until(self, replay: list[tuple[str, tuple[Any, ...]]]) -> None:
        await eventually(lambda: self.replay == replay, f"{self.head_id}: {replay}")

    def _share(self, replica_id: int, link: FakeLink) -> None:
        link.on_call = answer_calls
        self.pool.member(replica_id).remote = True

    async def _delay(self, seconds: float) -> None:
        await self.may_remind.wait()

    async def _read_front(self) -> None:
        while True:
            for item in await self.orchestrator.output_async_queue.get_batch():
                if not isinstance(item, ToldElsewhere):
                    continue
                for adapter in item.loaded:
                    self.adapters[adapter.lora_name] = adapter
                for name in [name for name, a in self.adapters.items() if a.lora_int_id in item.unloaded]:
                    del self.adapters[name]
                if item.sleep_level is not None:
                    self.sleep_level = item.sleep_level
                item.heeded.set_result(None)
