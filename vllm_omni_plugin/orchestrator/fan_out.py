"""Calls that must reach every replica, now and those that attach later."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator.engine_calls import FORGET_LORA
from vllm_omni_plugin.orchestrator.messages import CallReplicas, Explain, Membership, PeerMessage, RpcMessage
from vllm_omni_plugin.orchestrator.pause_order import PauseOrder
from vllm_omni_plugin.orchestrator.stage_calls import StageCall, StageCalls
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.thread_queue import QueueClosedError, ThreadQueue
from vllm_omni_plugin.replicas.stage_client import StageClient

_CACHE_CALLS = frozenset({"reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache"})
"""Done where there is no replica: one that comes later comes with empty caches."""

_Begun = list[tuple[StageCalls, StageCall]]


class SharedCall(Protocol):
    """A call that other heads are told of. No method raises: who could not be told hears of it later."""

    async def heard(self) -> None:
        """Returns when the others have recorded it."""

    async def over(self, taken: list[bool], calls: Sequence[StageCall]) -> None:
        """Tell the others what became of it; returns when they have heeded that.

        Args:
            taken: for each stage, whether any engine took it.
            calls: what the engines answered, by stage.
        """

    def withdraw(self) -> None:
        """It was not made after all. Returns at once."""


class PeerHeads(Protocol):
    """The other heads of the fleet, as calls of this one see them; `PeerCalls` in service."""

    async def synchronised(self) -> None:
        """Returns when this head knows what the others were told before it came, or nobody answers."""

    async def have_told(self, member: PoolMember, ask: bool) -> bool:
        """Whether another head has told a replica everything so far. Waits as `synchronised` does.

        Args:
            member: the replica.
            ask: inquire again if that is not known.
        """

    def begin(self, stages: list[int], calls: Sequence[StageCall]) -> SharedCall | None:
        """This head makes a call of these stages in this step. Returns None if it concerns no other head."""


class FanOut:
    """Sends utility calls to all replicas in parallel and keeps what they leave behind for late joiners.

    Args:
        stage_pools: the pools whose replicas are called, those that are held back too.
        distrust: called with a replica that failed a call which another one of its stage took, and the reason.
        pause_order: how the stages of a pipeline come to rest; None: all at once.

    Attributes:
        stages: the same by stage.
        peers: the other heads; None where there can be none.
    """

    def __init__(
        self,
        stage_pools: Sequence[StagePool],
        distrust: Callable[[PoolMember, str], None],
        pause_order: PauseOrder | None = None,
    ) -> None:
        self.stages = tuple(StageCalls(pool, distrust) for pool in stage_pools)
        self.peers: PeerHeads | None = None
        self._pause_order = pause_order

    async def serve(
        self, queue: ThreadQueue[RpcMessage], on_message: Callable[[Membership | Explain | PeerMessage], None]
    ) -> None:
        """Run each call of the queue as a task of its own, until the queue is closed; then cancel what still runs.

        Args:
            queue: calls, and whatever else the orchestrator is told, in order with them.
            on_message: called with each of the latter.
        """
        replies: dict[asyncio.Task[None], Future[list[Any]]] = {}
        try:
            while True:
                for message in await queue.get_batch():
                    if not isinstance(message, CallReplicas):
                        on_message(message)
                        continue
                    task = asyncio.create_task(self._serve_call(message), name=f"omni-call-{message.method}")
                    replies[task] = message.reply
                    task.add_done_callback(replies.pop)
        except QueueClosedError:
            pass
        finally:
            for task, reply in replies.items():
                task.cancel()
                reply.cancel()

    async def bring_up_to_date(self, member: PoolMember, client: StageClient) -> None:
        """Tell a replica that attaches what the others of its stage were told. When this returns, nothing was missed.

        The caller must let the replica serve without awaiting anything in between.

        Raises:
            ReplicaError: the replica refused, or no calls can give it the state of the others.
        """
        stage, told = self.stages[member.stage_id], False
        if self.peers is not None and member.remote:
            told = await self.peers.have_told(member, ask=stage.shared.unreplayable is not None)
        await stage.bring_up_to_date(client, told, remote=member.remote)

    async def _serve_call(self, message: CallReplicas) -> None:
        try:
            results = await self._call(message)
        except Exception as error:
            if message.reply.set_running_or_notify_cancel():
                message.reply.set_exception(error)
        else:
            if message.reply.set_running_or_notify_cancel():
                message.reply.set_result(results)

    async def _call(self, message: CallReplicas) -> list[Any]:
        if self._pause_order is None or message.stages is not None:
            return await self._call_at_once(message)
        results = []
        staffed = {stage_id for stage_id, stage in enumerate(self.stages) if stage.members}
        async with aclosing(self._pause_order.turns(message.method, message.args, staffed)) as turns:
            async for stage_ids in turns:
                results += await self._call_at_once(replace(message, stages=stage_ids))
        return results

    async def _call_at_once(self, message: CallReplicas) -> list[Any]:
        method, args = message.method, message.args
        if self.peers is not None:
            await self.peers.synchronised()
        stage_ids = list(range(len(self.stages)) if message.stages is None else message.stages)
        stages = [self.stages[stage_id] for stage_id in stage_ids]
        if method != FORGET_LORA and not any(stage.members for stage in stages):
            if method in _CACHE_CALLS:
                return []
            raise NoReplicaError(f"No replica can take the call {method} right now. Please try again later.")
        calls = [(stage, stage.begin(method, args)) for stage in stages]
        shared = self.peers.begin(stage_ids, [call for _, call in calls]) if self.peers else None
        await self._send(calls, shared)
        return await self._settle(calls, shared)

    async def _send(self, calls: _Begun, shared: SharedCall | None) -> None:
        """Send everywhere at once; returns when all have answered or failed."""
        try:
            await asyncio.gather(*(stage.send(call) for stage, call in calls), *([shared.heard()] if shared else []))
        except BaseException:
            for _, call in calls:
                call.settle(False)
            if shared is not None:
                shared.withdraw()
            raise

    async def _settle(self, calls: _Begun, shared: SharedCall | None) -> list[Any]:
        results = [result for _, call in calls for result in call.results]
        # A stage without replicas goes with the others: what they have taken, its first replica is told.
        taken = [call.method == FORGET_LORA or bool(call.results if call.members else results) for _, call in calls]
        for (stage, call), was_taken in zip(calls, taken, strict=True):
            call.settle(was_taken)
            stage.distrust_the_failed(call)
        if shared is not None:
            await shared.over(taken, [call for _, call in calls])
        for _, call in calls:
            if call.refused:
                raise call.answers[0]
            if call.not_allowed is not None:
                raise call.not_allowed
        return results
