"""Calls to the replicas of one stage, and what those that attach later have to be told of them."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_plugin.coordinator.protocol.call_arguments import FORGET_LORA
from vllm_omni_plugin.coordinator.protocol.head_messages import StageState
from vllm_omni_plugin.coordinator.state.shared_state import SharedState
from vllm_omni_plugin.errors import NotAllowedError, ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.replicas.client.stage_client import StageClient
from vllm_omni_plugin.vllm_api.requests.adapter import adapter_mismatch
from vllm_omni_plugin.vllm_api.requests.pause_state import Call

logger = init_logger(__name__)


@dataclass(slots=True)
class StageCall:
    """One call on its way to the replicas of one stage.

    Attributes:
        stage: the stage.
        method: method of vLLM's engine core.
        args: its positional arguments.
        members: the replicas that are called, in order of their ids.
        settle: to be called once with whether anybody took it.
        answers: what each of `members` said, a `ReplicaError` of those that failed.
        cleared: those that thereby dropped their prefix caches.
    """

    stage: "StageCalls"
    method: str
    args: tuple[Any, ...]
    members: list[PoolMember]
    settle: Callable[[bool], None]
    answers: list[Any] = field(default_factory=list)
    cleared: list[PoolMember] = field(default_factory=list)

    @property
    def results(self) -> list[Any]:
        """What those said that took it."""
        return [answer for answer in self.answers if not isinstance(answer, ReplicaError)]

    @property
    def refused(self) -> bool:
        """Whether there were replicas, and all of them failed."""
        return bool(self.members) and not self.results

    @property
    def failed(self) -> list[PoolMember]:
        """Those that failed."""
        return [m for m, answer in zip(self.members, self.answers, strict=True) if _is_failure(answer)]

    @property
    def not_allowed(self) -> NotAllowedError | None:
        """What a server said that does not let heads make this call, if one did."""
        return next((answer for answer in self.answers if isinstance(answer, NotAllowedError)), None)


class StageCalls:
    """The replicas of one stage, as utility calls see them.

    Args:
        pool: whose replicas are called, those that are held back too.
        distrust: called with a replica that failed a call which another one took, and the reason.

    Attributes:
        shared: what the replicas were told.
    """

    def __init__(self, pool: StagePool, distrust: Callable[[PoolMember, str], None]) -> None:
        self._pool = pool
        self._distrust = distrust
        self.shared = SharedState()
        # What each replica that is attaching has yet to be told.
        self._joiners: dict[StageClient, deque[Call]] = {}
        self._unnumbered = 0
        self._numbered = asyncio.Event()
        # Held while replicas of this node are told what they have missed: later calls must not overtake that.
        self._catching_up = asyncio.Lock()

    @property
    def members(self) -> list[PoolMember]:
        """Replicas that can be called."""
        return [member for member in self._pool.members if member.client is not None]

    async def bring_up_to_date(self, client: StageClient, told: bool, remote: bool) -> None:
        """Tell a replica that attaches what the others were told: adapters, pause, sleep; see `SharedState.replay`.

        Args:
            client: the replica's.
            told: another head has told it everything so far.
            remote: see `PoolMember`.

        Raises:
            ReplicaError: it cannot be told, or others refused a call meanwhile; it must not serve.
        """
        refusals = self.shared.rollbacks
        backlog = self._joiners[client] = deque([] if told else self.shared.replay())
        try:
            if not told:
                self._require_replayable()
            while backlog or self._unnumbered:
                if backlog:
                    # First, because an update of weights may not be made twice, and others may have called it.
                    self._require_replayable()
                    method, args = backlog.popleft()
                    await _tell(client, remote, method, args)
                else:
                    await self._numbered.wait()
        finally:
            del self._joiners[client]
        if self.shared.rollbacks != refusals:
            # It may have taken what the others did not, or what is not so any more. No call undoes another.
            raise ReplicaError(
                "it cannot be brought up to date: meanwhile others refused a call, or the coordinator told of new ones"
            )

    @contextmanager
    def unnumbered(self) -> Iterator[list[int]]:
        """Replicas that attach wait meanwhile: a call of this head waits for its number. Gives who is to be called."""
        self._unnumbered += 1
        self._numbered.clear()
        try:
            yield [member.engine_key for member in self.members]
        finally:
            self._unnumbered -= 1
            if not self._unnumbered:
                self._numbered.set()

    def begin(self, method: str, args: tuple[Any, ...], told: Collection[int] | None = None) -> StageCall:
        """Choose who is called, and record the call in the same step: a joiner is called or replays the record.

        Args:
            method: of the engine core.
            args: its arguments.
            told: replicas that another head calls, whose call it is; None: it is this head's own.
        """
        settle = self.shared.record(method, args)
        members = [member for member in self.members if told is None or member.engine_key not in told]
        call = StageCall(self, method, args, [] if method == FORGET_LORA else members, settle)
        if self.shared.leaves_state(method, args) and method != FORGET_LORA:
            for backlog in self._joiners.values():
                backlog.append((method, args))
        return call

    def adopt(self, snapshot: StageState) -> list[Call]:
        """Take the fleet's state for this head's.

        Returns:
            The calls by which a replica that was told what this head knew comes to know what the fleet does.

        Raises:
            WireError: it is none. Nothing has changed.
        """
        if snapshot == self.shared.snapshot(self._pool.stage_id):
            return []
        undo = self.shared.undo()
        self.shared.adopt(snapshot)
        return undo + self.shared.replay()

    async def catch_up(self, calls: list[Call]) -> None:
        """Tell the replicas that only this head reaches what they have missed. Other heads have told the others."""
        async with self._catching_up:
            await asyncio.gather(*(self._catch_up(member, calls) for member in self.members if not member.remote))

    async def send(self, call: StageCall) -> None:
        """Call all at once; returns when each has answered or failed."""
        call.answers = await asyncio.gather(*(self._call_in_turn(member, call) for member in call.members))

    def distrust_the_different(self, call: StageCall, taken: bool) -> None:
        """Take out the replicas that did otherwise than others of the stage, which took the call, or did not."""
        for member, answer in zip(call.members, call.answers, strict=True):
            if isinstance(answer, ReplicaError) is taken and not isinstance(answer, NotAllowedError):
                if taken:
                    logger.error("Replica %s failed the call %s: %s", member.name, call.method, answer)
                self.distrust(member, call.method)

    def distrust(self, member: PoolMember, method: str) -> None:
        """Take out a replica that has another state than the others."""
        self._distrust(member, f"it failed the call {method}, which others took")

    async def _catch_up(self, member: PoolMember, calls: list[Call]) -> None:
        for method, args in calls:
            call = StageCall(self, method, args, [member], lambda taken: None)
            call.answers = [await self._call_one(member, call)]
            if call.failed:
                logger.error("Replica %s cannot be told what other heads were: %s", member.name, call.answers[0])
                self.distrust(member, method)
                return

    async def _call_in_turn(self, member: PoolMember, call: StageCall) -> Any:
        if not member.remote:
            async with self._catching_up:
                pass
        return await self._call_one(member, call)

    async def _call_one(self, member: PoolMember, call: StageCall) -> Any:
        if member.client is None:
            return ReplicaError(f"replica {member.name} was lost before it could be called")
        try:
            result = await _tell(member.client, member.remote, call.method, call.args)
        except ReplicaError as error:
            return error
        if _clears_prefix_cache(call.method, call.args, result):
            call.cleared.append(member)
            self._pool.cache_cleared(member)
        return result

    def find(self, engines: Collection[int]) -> list[PoolMember]:
        """This head's replicas among these, by their engine keys."""
        return [member for member in self.members if member.engine_key in engines]

    def _require_replayable(self) -> None:
        if self.shared.unreplayable is not None:
            raise ReplicaError(f"it cannot be brought up to date: {self.shared.unreplayable}")


async def _tell(client: StageClient, remote: bool, method: str, args: tuple[Any, ...]) -> Any:
    """Call an engine; one on this node with this node's files of an adapter, as the server of a remote one does."""
    if method == "add_lora" and not remote and (why := await asyncio.to_thread(adapter_mismatch, args[0])):
        raise ReplicaError(why)
    return await client.call(method, *args)


def _is_failure(answer: Any) -> bool:
    """Whether an engine failed a call; one that was never asked did not."""
    return isinstance(answer, ReplicaError) and not isinstance(answer, NotAllowedError)


def _clears_prefix_cache(method: str, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an engine that took a call has dropped its prefix cache. Its own report of that waits for its next step.

    What is not given is vLLM's default: the cache is cleared.
    """
    match method:
        case "reset_prefix_cache":
            return bool(result)
        case "pause_scheduler" | "pause_generation":
            return len(args) < 2 or bool(args[1])
        case "sleep":
            return not args or bool(args[0] >= 1)
    return False
