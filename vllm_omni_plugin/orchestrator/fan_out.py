"""Calls that must reach every replica, now and those that attach later."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator.handover import HandoverClosedError, HandoverQueue
from vllm_omni_plugin.orchestrator.messages import CallReplicas, Explain, Membership, RpcMessage
from vllm_omni_plugin.orchestrator.stage_calls import StageCalls
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.replicas.stage_client import StageClient

_CACHE_CALLS = frozenset({"reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache"})
"""Done where there is no replica: one that comes later comes with empty caches."""


class FanOut:
    """Sends utility calls to all replicas in parallel and keeps what they leave behind for late joiners.

    Args:
        stage_pools: the pools whose replicas are called, those that are held back too.
        distrust: called with a replica that failed a call which another one of its stage took, and the reason.
    """

    def __init__(self, stage_pools: Sequence[StagePool], distrust: Callable[[PoolMember, str], None]) -> None:
        self._stages = tuple(StageCalls(pool, distrust) for pool in stage_pools)

    async def serve(
        self, queue: HandoverQueue[RpcMessage], on_membership: Callable[[Membership | Explain], None]
    ) -> None:
        """Run each call of the queue as a task of its own, until the queue is closed; then cancel what still runs.

        Args:
            queue: calls, and changes of and questions on membership in order with them.
            on_membership: called with each of the latter.
        """
        replies: dict[asyncio.Task[None], Future[list[Any]]] = {}
        try:
            while True:
                for message in await queue.get_batch():
                    if not isinstance(message, CallReplicas):
                        on_membership(message)
                        continue
                    task = asyncio.create_task(self._serve_call(message), name=f"omni-call-{message.method}")
                    replies[task] = message.reply
                    task.add_done_callback(replies.pop)
        except HandoverClosedError:
            pass
        finally:
            for task, reply in replies.items():
                task.cancel()
                reply.cancel()

    async def bring_up_to_date(self, stage_id: int, client: StageClient) -> None:
        """Tell a replica that attaches what the others of its stage were told. When this returns, nothing was missed.

        The caller must let the replica serve without awaiting anything in between.

        Raises:
            ReplicaError: the replica refused, or no calls can give it the state of the others.
        """
        await self._stages[stage_id].bring_up_to_date(client)

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
        method, args = message.method, message.args
        stages = self._stages if message.stages is None else [self._stages[stage_id] for stage_id in message.stages]
        if not any(stage.members for stage in stages):
            if method in _CACHE_CALLS:
                return []
            raise NoReplicaError(f"No replica can take the call {method} right now. Please try again later.")
        calls = [(stage, stage.begin(method, args)) for stage in stages]
        try:
            await asyncio.gather(*(stage.send(call) for stage, call in calls))
        except BaseException:
            for _, call in calls:
                call.settle(False)
            raise
        results = [result for _, call in calls for result in call.results]
        for stage, call in calls:
            # A stage without replicas goes with the others: what they have taken, its first replica is told.
            call.settle(bool(call.results if call.members else results))
            stage.distrust_the_failed(call)
        for _, call in calls:
            if call.refused:
                raise call.answers[0]
        return results
