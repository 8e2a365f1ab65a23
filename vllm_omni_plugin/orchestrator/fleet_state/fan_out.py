"""Calls that must reach every replica, now and those that attach later."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vllm_omni_plugin.coordinator.protocol.call_arguments import FORGET_LORA, encode
from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.fleet_state.stage_calls import StageCall, StageCalls
from vllm_omni_plugin.orchestrator.pipeline.pause_order import PauseOrder
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    CallReplicas,
    Explain,
    Membership,
    PeerMessage,
    RpcMessage,
)
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue

logger = init_logger(__name__)

_CACHE_CALLS = frozenset({"reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache"})
"""Done where there is no replica: one that comes later comes with empty caches."""


@dataclass(eq=False, slots=True)
class BegunCall:
    """A call that is recorded, and on its way to the replicas that this head calls.

    Attributes:
        number: the fleet's; 0 for one that other heads do not follow.
        method: of vLLM's engine core.
        args: its arguments.
        calls: the call in each of its stages.
        sending: done when all of these have answered or failed.
        unreached: engine keys of replicas that the other heads leave to this one, which has lost them since.
    """

    number: int
    method: str
    args: tuple[Any, ...]
    calls: list[tuple[StageCalls, StageCall]]
    sending: "asyncio.Future[Any]"
    unreached: Collection[int] = ()


class SharedCalls(Protocol):
    """The fleet's calls; `FleetCalls` in service."""

    async def synced(self) -> bool:
        """Returns when this head knows what the fleet was told before, or cannot learn it: whether it does."""

    async def begin(self, method: str, arguments: list[Any], stage_ids: Sequence[int]) -> BegunCall:
        """Begin a call when its turn among those of all heads has come.

        Args:
            method: of vLLM's engine core.
            arguments: see `call_arguments.encode`.
            stage_ids: the stages that are called.

        Raises:
            CoordinatorAwayError: other heads cannot be told.
        """

    async def finish(self, begun: BegunCall, taken: list[bool]) -> None:
        """Tell the other heads what became of a call; returns when they have done their part.

        Args:
            begun: the call.
            taken: for each of its stages, whether any engine took it.

        Raises:
            CoordinatorAwayError: it is not known whether they have been told.
        """

    def withdraw(self, begun: BegunCall) -> None:
        """The call was not made after all. Returns at once."""


class FanOut:
    """Sends utility calls to all replicas in parallel and keeps what they leave behind for late joiners.

    Args:
        stage_pools: the pools whose replicas are called, those that are held back too.
        distrust: called with a replica that failed a call which another one of its stage took, and the reason.
        pause_order: how the stages of a pipeline come to rest; None: all at once.

    Attributes:
        stages: one `StageCalls` per stage, by id.
    """

    def __init__(
        self,
        stage_pools: Sequence[StagePool],
        distrust: Callable[[PoolMember, str], None],
        pause_order: PauseOrder | None = None,
    ) -> None:
        self.stages = tuple(StageCalls(pool, distrust) for pool in stage_pools)
        self._pause_order = pause_order

    async def serve(
        self,
        queue: ThreadQueue[RpcMessage],
        on_message: Callable[[Membership | Explain | PeerMessage], None],
        shared: SharedCalls | None = None,
    ) -> None:
        """Run each call of the queue as a task of its own, until the queue is closed; then cancel what still runs.

        Args:
            queue: calls, and whatever else the orchestrator is told, in order with them.
            on_message: called with each of the latter.
            shared: the calls of all heads; None where there can be no other.
        """
        replies: dict[asyncio.Task[None], Future[list[Any]]] = {}
        try:
            while True:
                for message in await queue.get_batch():
                    if not isinstance(message, CallReplicas):
                        on_message(message)
                        continue
                    task = asyncio.create_task(self._serve_call(message, shared), name=f"omni-call-{message.method}")
                    replies[task] = message.reply
                    task.add_done_callback(replies.pop)
        except QueueClosedError:
            pass
        finally:
            for task, reply in replies.items():
                task.cancel()
                reply.cancel()

    def begin(
        self,
        stage_ids: Sequence[int],
        method: str,
        args: tuple[Any, ...],
        told: Collection[int] | None = None,
        number: int = 0,
    ) -> BegunCall:
        """Record a call and begin to send it, in this step. For `told` see `StageCalls.begin`."""
        stages = [self.stages[stage_id] for stage_id in stage_ids]
        calls = [(stage, stage.begin(method, args, told)) for stage in stages]
        return BegunCall(number, method, args, calls, _sending(calls))

    def begin_again(self, begun: BegunCall) -> BegunCall:
        """Send a call that is recorded to all replicas."""
        calls = [(stage, StageCall(c.method, c.args, stage.members, c.settle)) for stage, c in begun.calls]
        return BegunCall(begun.number, begun.method, begun.args, calls, _sending(calls))

    async def settle(self, begun: BegunCall, shared: SharedCalls | None = None) -> list[Any]:
        """Wait for the answers to a call of this head, and see that all heads come to the same end of it.

        Args:
            begun: the call.
            shared: see `serve`.

        Returns:
            What the replicas answered that took it.

        Raises:
            ReplicaError: none took it.
            CoordinatorAwayError: it is not known whether other heads have been told.
        """
        try:
            await begun.sending
        except BaseException:
            for _, call in begun.calls:
                call.settle(False)
            if begun.number and shared is not None:
                shared.withdraw(begun)
            raise
        results = [result for _, call in begun.calls for result in call.results]
        # A stage without replicas goes with the others: what they have taken, its first replica is told.
        forgets = begun.method == FORGET_LORA
        taken = [forgets or bool(call.results if call.members else results) for _, call in begun.calls]
        for (stage, call), was_taken in zip(begun.calls, taken, strict=True):
            call.settle(was_taken)
            stage.distrust_the_failed(call)
        if begun.number and shared is not None:
            await shared.finish(begun, taken)
        for _, call in begun.calls:
            if call.refused:
                raise call.answers[0]
            if call.not_allowed is not None:
                raise call.not_allowed
        return results

    async def _serve_call(self, message: CallReplicas, shared: SharedCalls | None) -> None:
        try:
            results = await self._call(message, shared)
        except Exception as error:
            if message.reply.set_running_or_notify_cancel():
                message.reply.set_exception(error)
        else:
            if message.reply.set_running_or_notify_cancel():
                message.reply.set_result(results)

    async def _call(self, message: CallReplicas, shared: SharedCalls | None) -> list[Any]:
        if self._pause_order is None or message.stages is not None:
            return await self._call_at_once(message, shared)
        results = []
        staffed = {stage_id for stage_id, stage in enumerate(self.stages) if stage.members}
        async with aclosing(self._pause_order.turns(message.method, message.args, staffed)) as turns:
            async for stage_ids in turns:
                results += await self._call_at_once(replace(message, stages=stage_ids), shared)
        return results

    async def _call_at_once(self, message: CallReplicas, shared: SharedCalls | None) -> list[Any]:
        method, args = message.method, message.args
        stage_ids = range(len(self.stages)) if message.stages is None else message.stages
        stages = [self.stages[stage_id] for stage_id in stage_ids]
        if method != FORGET_LORA and not any(stage.members for stage in stages):
            if method in _CACHE_CALLS:
                return []
            raise NoReplicaError(f"No replica can take the call {method} right now. Please try again later.")
        arguments = None if shared is None else encode(method, args)
        if shared is not None and arguments is not None:
            return await self.settle(await shared.begin(method, arguments, stage_ids), shared)
        if shared is not None and stages[0].shared.leaves_state(method, args):
            logger.warning("Other heads cannot be told of this call of %s.", method)
        return await self.settle(self.begin(stage_ids, method, args), shared)


def _sending(calls: Sequence[tuple[StageCalls, StageCall]]) -> "asyncio.Future[Any]":
    return asyncio.gather(*(stage.send(call) for stage, call in calls))
