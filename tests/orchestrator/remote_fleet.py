"""A head whose replicas of other processes are links in memory."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.fleet import FakeFleet
from tests.fakes.links import FakeLink, answer_calls
from vllm_omni_plugin.coordinator import ReplicaInfo
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD, ReplicaState
from vllm_omni_plugin.orchestrator.attachment.remote_replicas import RemoteReplicas
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RegisterRemoteReplica, UnregisterRemoteReplica
from vllm_omni_plugin.replicas.links.engine_client import EngineClient
from vllm_omni_plugin.replicas.remote.remote_replica import AttachSettings, OnOutputs, OnStatus


class Attachment:
    """Satisfies `RemoteReplica` over a link in memory."""

    ready_response = b"ready"
    sleeps = False
    machines: tuple[str, ...] = ()

    def __init__(
        self,
        info: ReplicaInfo,
        replica_id: int,
        on_outputs: OnOutputs,
        on_status: OnStatus,
        told: ReplicaState = NOTHING_TOLD,
    ) -> None:
        self.info = info
        self.incarnation = info.incarnation
        self.link = FakeLink(info.control_addr)
        self.on_outputs, self.on_status = on_outputs, on_status
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.on_late: Callable[[bool], None] = lambda late: None
        self.on_told: Callable[[ReplicaState], None] = lambda told: None
        self.on_busy: Callable[[bool], None] = lambda busy: None
        self.told = told
        self.client = EngineClient(self.link, FakeEngineApi(), replica_id, on_outputs, self._end)
        self.client.start()
        self.drain_requested = self.closed = False

    def report_told(self, told: ReplicaState) -> None:
        self.told = told

    def _end(self, reason: str) -> None:
        self.lost.set_result(reason)
        self.on_lost(reason)

    def request_drain(self) -> None:
        self.drain_requested = True

    def close(self) -> None:
        self.closed = True
        self.on_lost = lambda reason: None
        self.client.close()


class Fleet(FakeFleet):
    """A head without replicas of its own, and those that it has attached to.

    Attributes:
        attachments: all ever made, in order.
        failures: what the next attempts to attach come to instead.
        pauses: how long it meant to wait between attempts.
        may_attach: attempts wait for it.
        most_attaching: how many have waited at once.
        answers_calls: whether the next replicas answer calls at once.
        told_before: what other heads have told the next replicas.
    """

    def __init__(self, stall_timeout: float = 0.0) -> None:
        super().__init__(replicas=0, replica_wait=60.0, stall_timeout=stall_timeout)
        self.attachments: list[Attachment] = []
        self.failures: deque[Exception] = deque()
        self.told_before: list[ReplicaState] = []
        self.answers_calls = True
        self.pauses: list[float] = []
        self.attaching = self.most_attaching = 0
        self.may_attach = asyncio.Event()
        self.may_attach.set()
        self.pause_over = asyncio.Event()
        self.pause_over.set()
        self.remote = RemoteReplicas(
            self.orchestrator,
            self.fleet_calls,
            AttachSettings({0: FakeEngineApi()}, "head", {0: {}}, 1.0, 10.0, clock=lambda: self.now),
            attach=self.attach,
            delay=self.delay,
        )

    async def __aexit__(self, *error: object) -> None:
        await self.remote.close()
        await super().__aexit__(*error)

    async def attach(
        self, info: ReplicaInfo, replica_id: int, settings: AttachSettings, on_outputs: OnOutputs, on_status: OnStatus
    ) -> Any:
        self.attaching += 1
        self.most_attaching = max(self.most_attaching, self.attaching)
        await self.may_attach.wait()
        self.attaching -= 1
        if self.failures:
            raise self.failures.popleft()
        former = [each for each in self.attachments if each.info.incarnation == info.incarnation]
        told = [each.told for each in former if each.info.input_addr == info.input_addr][-1:]
        # This was the last head of that engine.
        told = [ReplicaState(state=each.state) for each in told]
        attachment = Attachment(info, replica_id, on_outputs, on_status, *told, *self.told_before)
        attachment.link.on_call = answer_calls if self.answers_calls else None
        self.attachments.append(attachment)
        return attachment

    async def delay(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self.pause_over.wait()

    def register(self, info: ReplicaInfo, accepts: bool = True) -> None:
        self.orchestrator.rpc_async_queue.put(RegisterRemoteReplica(info, accepts))

    def unregister(self, info: ReplicaInfo) -> None:
        message = UnregisterRemoteReplica(info.stage_id, info.input_addr, info.output_addr, "it is not listed")
        self.orchestrator.rpc_async_queue.put(message)

    async def joined(self, *infos: ReplicaInfo) -> list[Attachment]:
        for info in infos:
            self.register(info)
        await self.serving(len(infos))
        return self.attachments[-len(infos) :]

    async def serving(self, count: int) -> None:
        await eventually(lambda: len(self.pool.serving) == count, f"{count} replicas that serve")

    async def all_handled(self) -> None:
        """Return when every message so far has been dealt with."""
        await eventually(lambda: len(self.orchestrator.rpc_async_queue) == 0)
        await asyncio.sleep(0)
