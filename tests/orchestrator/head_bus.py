"""Several heads of one fleet at a coordinator in memory, whose frames the test may hold back."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import cached_property, partial
from typing import Any

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.fleet import FakeFleet
from tests.fakes.links import FakeLink, answer_calls
from vllm_omni_plugin.coordinator import ReplicaWork, SessionLost
from vllm_omni_plugin.coordinator.client.head_client import HeadSession, SessionOutput
from vllm_omni_plugin.coordinator.protocol.call_effects import calls_between
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD, ReplicaState, StageState
from vllm_omni_plugin.coordinator.protocol.head_messages import CallMessageFromHead, FleetCall, decode_from_head
from vllm_omni_plugin.coordinator.state.connected_heads import ConnectedHeads, OutgoingFrame
from vllm_omni_plugin.coordinator.state.list_deltas import ListDeltas
from vllm_omni_plugin.coordinator.state.membership_table import MembershipTable
from vllm_omni_plugin.coordinator.state.number_book import ReplicaIds
from vllm_omni_plugin.orchestrator import SessionListener
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import AbortedElsewhere, EngineStateUpdate
from vllm_omni_plugin.orchestrator.pool.work_exchange import WorkExchange
from vllm_omni_plugin.replicas.links.engine_client import EngineClient
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter


class HeadBus:
    """The coordinator, without sockets. Frames arrive in the order in which they were sent.

    Attributes:
        calls: what heads asked the coordinator to pass on.
        delayed: heads whose frames wait until they are no longer in here.
    """

    def __init__(self) -> None:
        self.calls: list[FleetCall] = []
        self.delayed: set[str] = set()
        self.attached: list[FakeHead] = []
        # By the address of the replica.
        self.told: dict[str, ReplicaState] = {}
        self._heads: dict[bytes, FakeHead] = {}
        self._now = 0.0
        self._connections = 0
        self.start()
        self._lists.next_delta(self._now, self._now)

    def start(self) -> None:
        """A coordinator without state, whose old heads may still come back."""
        self._lists = ListDeltas(MembershipTable(30.0), ReplicaIds())
        self._sessions = ConnectedHeads(self._lists)

    def settle(self) -> None:
        """All old heads have come back."""
        self._lists.next_delta(self._now, self._now)
        self.wake()

    def tell(self, address: str, told: ReplicaState) -> None:
        """The server of a replica passes on what its engine was told, to all heads that are attached to it."""
        self.told[address] = told
        for head in self.attached:
            for member in head.pool.members:
                if member.remote and member.input_addr == address:
                    head.orchestrator.stage_calls[0].told_elsewhere(member, told)

    def connect(self, head: "FakeHead") -> None:
        self._connections += 1
        self._heads = {peer: other for peer, other in self._heads.items() if other is not head}
        head.peer = b"%d" % self._connections
        head.inbox.clear()
        self._heads[head.peer] = head
        head.session.disconnected()
        head.session.open(self._connections)
        self.wake()

    def cut(self, head: "FakeHead", noticed: bool = True) -> None:
        """A head has no connection any more, which the coordinator may have noticed."""
        self._heads.pop(head.peer, None)
        head.session.disconnected()
        head.receive([SessionLost()])
        if noticed:
            self._deliver(self._sessions.connection_lost(head.peer))

    def deliver_delayed(self) -> None:
        self.delayed.clear()
        self.wake()

    def wake(self) -> None:
        """Let frames arrive in the loop's next turn."""
        asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        for head in list(self._heads.values()):
            while head.session.frames:
                frame = decode_from_head(head.session.frames.popleft())
                self._deliver(self._sessions.handle(head.peer, frame, self._now) or [])
        self._now += 1.0
        self._deliver(self._sessions.tick(self._now))
        for head in list(self._heads.values()):
            while head.inbox and head.head_id not in self.delayed:
                head.receive(head.session.receive(head.inbox.popleft(), self._now))

    def _deliver(self, letters: list[OutgoingFrame]) -> None:
        for peer, frame in letters:
            if peer in self._heads:
                self._heads[peer].inbox.append(frame)
                self.wake()


class FakeHead(FakeFleet):
    """A head at the bus. Its replicas have the same addresses as those of the other heads.

    Attributes:
        adapters: adapters that requests may name, as AsyncLLM was notified.
        sleep_level: as AsyncLLM was notified.
        aborted: ids of requests that AsyncLLM should abort, of each call.
    """

    def __init__(self, bus: HeadBus, head_id: str, replicas: int = 2) -> None:
        self.bus, self.head_id = bus, head_id
        bus.attached.append(self)
        self.session = HeadSession(head_id)
        super().__init__(replicas, exchange=WorkExchange(self.report))
        for replica_id, link in self.links.items():
            self._share(replica_id, link)
        self.peer = b""
        self.inbox: deque[bytes] = deque()
        self.adapters: dict[str, Adapter] = {}
        self.sleep_level = 0
        self.aborted: list[list[str]] = []
        self._listener = SessionListener(self.orchestrator.rpc_async_queue)

    @cached_property
    def fleet_calls(self) -> FleetCalls:
        return FleetCalls(self.orchestrator, self.head_id, lambda: self)  # type: ignore[arg-type, return-value]

    def report(self, work: Sequence[ReplicaWork], full: bool) -> None:
        """As `OmniCoordClientForHead.report_work`."""
        self.session.report(work, full)

    async def __aenter__(self) -> "FakeHead":
        await super().__aenter__()
        self._reader = asyncio.create_task(self._read_updates())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.bus.cut(self)
        self.bus.attached.remove(self)
        await super().__aexit__()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def join_fleet(self) -> None:
        """Connect; returns when this head has the fleet's state."""
        self.bus.connect(self)
        await eventually(lambda: self.fleet_calls.session.refusal is None)
        await self.fleet_calls.session.wait_synced()

    def receive(self, outputs: list[SessionOutput]) -> None:
        for one in outputs:
            assert not isinstance(one, Exception), one
            self._listener(one)  # type: ignore[arg-type]

    def send(self, message: CallMessageFromHead) -> bool:
        """As `OmniCoordClientForHead`."""
        if isinstance(message, FleetCall):
            self.bus.calls.append(message)
        self.bus.wake()
        return self.session.send(message)

    def attach(self, replica_id: int, private: bool = False) -> FakeLink:
        link = self.join(self.pool.add(replica_id))
        self._share(replica_id, link)
        self.pool.member(replica_id).remote = not private
        return link

    async def bring_up(
        self, replica_id: int, told: ReplicaState = NOTHING_TOLD, link: FakeLink | None = None
    ) -> list[Any]:
        """A replica of another process attaches; returns what this head tells it before it serves."""
        if link is None:
            link = FakeLink(f"replica-{replica_id}")
            link.on_call = answer_calls
        member = self.pool.add(replica_id)
        member.told = told
        member.remote, member.input_addr, member.output_addr = True, link.input_addr, link.output_addr
        client = EngineClient(link, FakeEngineApi(), str(replica_id), lambda outputs: None, lambda reason: None)
        client.start()
        async with asyncio.timeout(10):
            await self.fleet_calls.session.wait_synced()
            await self.orchestrator.prepare_replica(member, client, b"", told.state.is_paused)
        member.report_told = partial(self.bus.tell, member.input_addr)
        self.pool.serve(member, client, link.input_addr, link.output_addr)
        return [(method, args) for _, method, args in link.calls]

    def calls(self, replica_id: int) -> list[tuple[str, list[Any]]]:
        return [(method, args) for _, method, args in self.links[replica_id].calls]

    def stop_answering(self) -> None:
        """Its replicas do not answer any more."""
        self.answer_with(None)

    def ask_unanswered(self, method: str, *args: Any) -> Future[list[Any]]:
        """Make an operator call that its replicas do not answer."""
        self.stop_answering()
        return self.ask(method, *args)

    def answer_last(self) -> None:
        """They answer what they were asked last."""
        for link in self.links.values():
            link.answer(link.calls[-1][0])

    @property
    def replay(self) -> list[tuple[str, tuple[Any, ...]]]:
        """What this head tells a replica that attaches."""
        return calls_between(StageState(), self.orchestrator.stage_calls[0].state, False)

    async def until(self, replay: list[tuple[str, tuple[Any, ...]]]) -> None:
        await eventually(lambda: self.replay == replay, f"{self.head_id}: {replay}")

    def _share(self, replica_id: int, link: FakeLink) -> None:
        link.on_call = answer_calls
        member = self.pool.member(replica_id)
        member.remote, member.report_told = True, partial(self.bus.tell, member.input_addr)
        member.told = self.bus.told.get(member.input_addr, NOTHING_TOLD)

    async def _read_updates(self) -> None:
        while True:
            for item in await self.orchestrator.front_end.output_async_queue.get_batch():
                if isinstance(item, AbortedElsewhere):
                    self.aborted.append(list(item.request_ids))
                    item.applied.set_result(None)
                if not isinstance(item, EngineStateUpdate):
                    continue
                for adapter in item.loaded:
                    self.adapters[adapter.lora_name] = adapter
                for name in [name for name, a in self.adapters.items() if a.lora_int_id in item.unloaded]:
                    del self.adapters[name]
                if item.sleep_level is not None:
                    self.sleep_level = item.sleep_level
                item.applied.set_result(None)


async def joined(stack: AsyncExitStack, bus: HeadBus, head_id: str, replicas: int = 2) -> FakeHead:
    """Start a head that has the fleet's state; the stack ends it."""
    head = await stack.enter_async_context(FakeHead(bus, head_id, replicas))
    await head.join_fleet()
    return head
