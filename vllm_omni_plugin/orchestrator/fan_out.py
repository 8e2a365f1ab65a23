"""Calls that must reach every replica, now and those that attach later."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from vllm_omni_plugin.errors import NoReplicaError, ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.handover import HandoverClosedError, HandoverQueue
from vllm_omni_plugin.orchestrator.messages import CallReplicas, Explain, Membership, RpcMessage
from vllm_omni_plugin.orchestrator.rest_state import Call
from vllm_omni_plugin.orchestrator.shared_state import SharedState
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.replicas.stage_client import StageClient

logger = init_logger(__name__)

_CACHE_CALLS = frozenset({"reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache"})
"""Done where there is no replica: one that comes later comes with empty caches."""


class FanOut:
    """Sends utility calls to all replicas in parallel and keeps what they leave behind for late joiners.

    Args:
        stage_pools: the pools whose replicas are called, those that are held back too.
        distrust: called with a replica that failed a call which another one took, and the reason.
    """

    def __init__(self, stage_pools: Sequence[StagePool], distrust: Callable[[PoolMember, str], None]) -> None:
        self._pools = stage_pools
        self._distrust = distrust
        self._shared = SharedState()
        # What each replica that is attaching has yet to be told.
        self._joiners: dict[StageClient, deque[Call]] = {}

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

    async def bring_up_to_date(self, client: StageClient) -> None:
        """Tell a replica that attaches what the others have been told. When this returns, nothing was missed.

        The caller must let the replica serve without awaiting anything in between.

        Raises:
            ReplicaError: the replica refused, or no calls can give it the state of the others.
        """
        refusals = self._shared.refusals
        backlog = self._joiners[client] = deque(self._shared.replay())
        try:
            self._require_replayable()
            while backlog:
                method, args = backlog.popleft()
                await client.call(method, *args)
                self._require_replayable()
        finally:
            del self._joiners[client]
        if self._shared.refusals != refusals:
            # It may have taken what the others did not, and there is no call that undoes another.
            raise ReplicaError("it cannot be brought up to date: a call was refused by the others meanwhile")

    def _require_replayable(self) -> None:
        if self._shared.unreplayable is not None:
            raise ReplicaError(f"it cannot be brought up to date: {self._shared.unreplayable}")

    async def _serve_call(self, message: CallReplicas) -> None:
        try:
            results = await self._call(message.method, message.args)
        except Exception as error:
            if message.reply.set_running_or_notify_cancel():
                message.reply.set_exception(error)
        else:
            if message.reply.set_running_or_notify_cancel():
                message.reply.set_result(results)

    async def _call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        members = [member for pool in self._pools for member in pool.members if member.client is not None]
        if not members and method in _CACHE_CALLS:
            return []
        if not members:
            raise NoReplicaError(f"No replica can take the call {method} right now. Please try again later.")
        # Recorded in the same step as the targets are chosen: a joiner either is among them or replays the record.
        settle = self._record(method, args)
        try:
            answers = await asyncio.gather(*(self._call_one(member, method, args) for member in members))
        except BaseException:
            settle(False)
            raise
        errors = [answer for answer in answers if isinstance(answer, ReplicaError)]
        settle(len(errors) < len(members))
        if len(errors) == len(members):
            raise errors[0]
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, ReplicaError):
                logger.error("Replica %d failed the call %s: %s", member.replica_id, method, answer)
                self._distrust(member, f"it failed the call {method}, which others took")
        return [answer for answer in answers if not isinstance(answer, ReplicaError)]

    def _record(self, method: str, args: tuple[Any, ...]) -> Callable[[bool], None]:
        if self._shared.leaves_state(method, args):
            for backlog in self._joiners.values():
                backlog.append((method, args))
        return self._shared.record(method, args)

    async def _call_one(self, member: PoolMember, method: str, args: tuple[Any, ...]) -> Any:
        try:
            assert member.client is not None
            result = await member.client.call(method, *args)
        except ReplicaError as error:
            return error
        if _clears_prefix_cache(method, args, result):
            self._pools[member.stage_id].cache_cleared(member)
        return result


def _clears_prefix_cache(method: str, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an engine that took a call has dropped its prefix cache. Its own report of that waits for its next step.

    What is not given is vLLM's default: the cache is cleared.
    """
    match method:
        case "reset_prefix_cache":
            return bool(result)
        case "pause_scheduler":
            return len(args) < 2 or bool(args[1])
        case "sleep":
            return not args or bool(args[0] >= 1)
    return False
