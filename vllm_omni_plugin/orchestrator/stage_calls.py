"""Calls to the replicas of one stage, and what those that attach later have to be told of them."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.shared_state import SharedState
from vllm_omni_plugin.orchestrator.stage_pool import StagePool
from vllm_omni_plugin.replicas.stage_client import StageClient
from vllm_omni_plugin.vllm_api.rest_state import Call

logger = init_logger(__name__)

_Settle = Callable[[bool], None]


@dataclass(slots=True)
class StageCall:
    """One call on its way to the replicas of one stage.

    Attributes:
        method: method of vLLM's engine core.
        args: its positional arguments.
        members: the replicas that are called, in order of their ids.
        settle: to be called once with whether anybody took it.
        answers: what each of `members` said, a `ReplicaError` of those that failed.
    """

    method: str
    args: tuple[Any, ...]
    members: list[PoolMember]
    settle: _Settle
    answers: list[Any] = field(default_factory=list)

    @property
    def results(self) -> list[Any]:
        """What those said that took it."""
        return [answer for answer in self.answers if not isinstance(answer, ReplicaError)]

    @property
    def refused(self) -> bool:
        """Whether there were replicas, and all of them failed."""
        return bool(self.members) and not self.results


class StageCalls:
    """The replicas of one stage, as utility calls see them.

    Args:
        pool: whose replicas are called, those that are held back too.
        distrust: called with a replica that failed a call which another one took, and the reason.
    """

    def __init__(self, pool: StagePool, distrust: Callable[[PoolMember, str], None]) -> None:
        self._pool = pool
        self._distrust = distrust
        self._shared = SharedState()
        # What each replica that is attaching has yet to be told.
        self._joiners: dict[StageClient, deque[Call]] = {}

    @property
    def members(self) -> list[PoolMember]:
        """Replicas that can be called."""
        return [member for member in self._pool.members if member.client is not None]

    async def bring_up_to_date(self, client: StageClient) -> None:
        """See `FanOut.bring_up_to_date`."""
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

    def begin(self, method: str, args: tuple[Any, ...]) -> StageCall:
        """Choose who is called, and record the call in the same step: a joiner is called or replays the record."""
        if self._shared.leaves_state(method, args):
            for backlog in self._joiners.values():
                backlog.append((method, args))
        return StageCall(method, args, self.members, self._shared.record(method, args))

    async def send(self, call: StageCall) -> None:
        """Call all at once; returns when each has answered or failed."""
        call.answers = await asyncio.gather(*(self._call_one(member, call) for member in call.members))

    def distrust_the_failed(self, call: StageCall) -> None:
        """Take out the replicas that failed what others of the stage took."""
        if call.refused:
            return
        for member, answer in zip(call.members, call.answers, strict=True):
            if isinstance(answer, ReplicaError):
                logger.error("Replica %s failed the call %s: %s", member.name, call.method, answer)
                self._distrust(member, f"it failed the call {call.method}, which others took")

    async def _call_one(self, member: PoolMember, call: StageCall) -> Any:
        try:
            assert member.client is not None
            result = await member.client.call(call.method, *call.args)
        except ReplicaError as error:
            return error
        if _clears_prefix_cache(call.method, call.args, result):
            self._pool.cache_cleared(member)
        return result

    def _require_replayable(self) -> None:
        if self._shared.unreplayable is not None:
            raise ReplicaError(f"it cannot be brought up to date: {self._shared.unreplayable}")


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
