"""Utility calls to the replicas of one stage, and their replay to replicas that attach later."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_plugin.coordinator.protocol.call_arguments import HEAD_CALLS
from vllm_omni_plugin.coordinator.protocol.head_messages import StageState
from vllm_omni_plugin.coordinator.state.shared_state import SharedState
from vllm_omni_plugin.errors import AdapterFilesError, NotAllowedError, ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool.pool_member import ASLEEP_CORDON, WEIGHTS_CORDON, PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.replicas.client.stage_client import LONG_CALLS, StageClient
from vllm_omni_plugin.vllm_api.requests.adapter import adapter_mismatch
from vllm_omni_plugin.vllm_api.requests.pause_state import PAUSE_CALLS, EngineCall

logger = init_logger(__name__)


@dataclass(slots=True)
class StageCall:
    """One call to the replicas of one stage.

    Attributes:
        method: method of vLLM's engine core.
        members: the replicas that are called, in order of their ids.
        settle: to be called once with whether any replica accepted the call.
        answers: the answers of `members`; a `ReplicaError` for each that failed.
        cleared: the replicas that cleared their prefix caches for the call.
        called_elsewhere: engine keys of the replicas that another head calls.
        completes_update: whether all replicas that accept the call have the same weights after it.
    """

    stage: "StageCalls"
    method: str
    args: tuple[Any, ...]
    members: list[PoolMember]
    settle: Callable[[bool], None]
    answers: list[Any] = field(default_factory=list)
    cleared: list[PoolMember] = field(default_factory=list)
    called_elsewhere: Collection[int] = ()
    completes_update: bool = False

    @property
    def results(self) -> list[Any]:
        """The answers of the replicas that accepted the call."""
        return [answer for answer in self.answers if _is_result(answer)]

    @property
    def refused(self) -> bool:
        """Whether there were replicas, and all of them failed."""
        return bool(self.members) and not self.results

    @property
    def failed(self) -> list[PoolMember]:
        return [m for m, answer in zip(self.members, self.answers, strict=True) if _is_failure(answer)]

    @property
    def not_allowed(self) -> NotAllowedError | None:
        """The error of a replica server that does not allow heads to make this call, if there is one."""
        return next((answer for answer in self.answers if isinstance(answer, NotAllowedError)), None)


class StageCalls:
    """Utility calls to one stage, and the shared state that they leave.

    Args:
        pool: its replicas are called, also those that are cordoned.
        distrust: called with a replica that failed a call which another replica accepted, and the reason.
        hold_back: called with a replica and whether it must wait for a weight update before it serves.
        uncordon: called with each replica that is found asleep, when a call says if engines pause or sleep.

    Attributes:
        shared: the state that all replicas of the stage should have.
    """

    def __init__(
        self,
        pool: StagePool,
        distrust: Callable[[PoolMember, str], None],
        hold_back: Callable[[PoolMember, bool], None],
        uncordon: Callable[[PoolMember, str], None],
    ) -> None:
        self._pool = pool
        self._distrust = distrust
        self._hold_back = hold_back
        self._uncordon = uncordon
        self.shared = SharedState()
        # The calls that each attaching replica has still to get.
        self._joiners: dict[StageClient, deque[EngineCall]] = {}
        # By engine key, also of engines that are lost: whether it has the weights of the fleet; None: it has those of
        # the model's files.
        self._has_weights: dict[int, bool | None] = {}
        # Open calls during which engines compute no requests, this head's and those of other heads.
        self._halting: set[object] = set()
        self._unnumbered = 0
        self._numbered = asyncio.Event()
        # Held while local replicas get the calls they have missed: later calls must not overtake these.
        self._catching_up = asyncio.Lock()

    @property
    def members(self) -> list[PoolMember]:
        return [member for member in self._pool.members if member.client is not None]

    def is_halted(self) -> bool:
        """Whether an operator's call keeps the engines from computing requests: a long one, a pause or a sleep."""
        return bool(self._halting) or self.shared.is_paused

    async def bring_up_to_date(
        self, client: StageClient, engine: int, synced: bool, remote: bool, sleeps: bool = False
    ) -> bool:
        """Make the calls that an attaching replica has missed: adapters, pause, sleep; see `SharedState.replay`.

        Args:
            engine: its engine key. It may have been attached before: it hung, or its lease ended.
            synced: another head has made all calls so far.
            remote: see `PoolMember`.
            sleeps: its engine is paused or asleep. It stays so unless an operator has ended that meanwhile.

        Returns:
            Whether its engine has the weights of the others. If not, it must wait for the next complete update.

        Raises:
            ReplicaError: a call failed, other replicas refused one meanwhile, or it cannot be known whether another
                head has updated its weights meanwhile; the replica must not serve.
        """
        rollbacks = self.shared.rollbacks
        backlog = self._joiners[client] = deque([] if synced else self.shared.replay())
        try:
            if sleeps and not synced and self.shared.sets_pause and not self.shared.undo():
                backlog.appendleft(("wake_up", (None,)))
            while backlog or self._unnumbered:
                if not backlog:
                    await self._numbered.wait()
                    continue
                method, args = backlog.popleft()
                if method != "collective_rpc":
                    await _call_engine(client, remote, method, args)
                elif remote:
                    # It must not run twice, and another head may have made it.
                    raise ReplicaError("weights were updated while this head attached to it")
        finally:
            del self._joiners[client]
        if self.shared.rollbacks != rollbacks:
            # The replica may have accepted a call that others refused, or that is outdated. No call undoes another.
            raise ReplicaError(
                "it cannot be brought up to date: other replicas refused a call meanwhile, or it has new ones to get"
            )
        if synced:
            self._has_weights[engine] = True
        else:
            self._has_weights.setdefault(engine, None)
        return self._is_updated(engine)

    @contextmanager
    def unnumbered(self) -> Iterator[list[int]]:
        """Let attaching replicas wait while a call of this head waits for its number. Yields the engines to call."""
        self._unnumbered += 1
        self._numbered.clear()
        try:
            yield [member.engine_key for member in self.members]
        finally:
            self._unnumbered -= 1
            if not self._unnumbered:
                self._numbered.set()

    def begin(self, method: str, args: tuple[Any, ...], called_elsewhere: Collection[int] | None = None) -> StageCall:
        """Choose the replicas to be called, and record the call in the same step: a joiner is called, or replays it.

        Args:
            called_elsewhere: engine keys of replicas that another head calls, for a call of that head.
        """
        all_fresh = all(WEIGHTS_CORDON in member.cordons for member in self.members)
        completes_update = self.shared.completes_weight_update(method, args, all_fresh)
        settle = self.shared.record(method, args)
        if method in LONG_CALLS or method in PAUSE_CALLS:
            settle = self._halt(settle)
        skipped = called_elsewhere or ()
        members = [member for member in self.members if member.engine_key not in skipped]
        call = StageCall(
            self,
            method,
            args,
            [] if method in HEAD_CALLS else members,
            settle,
            called_elsewhere=skipped,
            completes_update=completes_update,
        )
        if method in PAUSE_CALLS:
            for member in self.members:
                self._uncordon(member, ASLEEP_CORDON)
        if self.shared.leaves_state(method, args) and method not in HEAD_CALLS:
            for backlog in self._joiners.values():
                backlog.append((method, args))
        return call

    def _halt(self, settle: Callable[[bool], None]) -> Callable[[bool], None]:
        call = object()
        self._halting.add(call)

        def settle_and_go_on(taken: bool) -> None:
            settle(taken)
            self._halting.discard(call)
            self._pool.restart_silence()

        return settle_and_go_on

    def adopt(self, snapshot: StageState) -> list[EngineCall]:
        """Replace this head's state with the fleet's.

        Returns:
            The calls that bring a replica from the old state to the new one.

        Raises:
            WireError: the snapshot is invalid. Nothing has changed.
        """
        if snapshot == self.shared.snapshot(self._pool.stage_id):
            return []
        undo, had_changed = self.shared.undo(), self.shared.weights_changed
        self.shared.adopt(snapshot)
        if self.shared.weights_changed and not had_changed:
            # Other heads have updated the remote ones.
            for member in self.members:
                if not member.remote:
                    self._has_weights[member.engine_key] = False
                    self._hold_back(member, True)
        self._release_updated()
        self._pool.restart_silence()
        return undo + self.shared.replay()

    async def catch_up(self, calls: list[EngineCall]) -> None:
        """Make missed calls to local replicas. Other heads have made them to the remote ones."""
        async with self._catching_up:
            await asyncio.gather(*(self._catch_up(member, calls) for member in self.members if not member.remote))

    async def send(self, call: StageCall) -> None:
        call.answers = await asyncio.gather(*(self._call_in_turn(member, call) for member in call.members))

    def conclude(self, call: StageCall, taken: bool, failed_elsewhere: Collection[int] = ()) -> None:
        """Take out replicas that differ from the others after a call; let those serve that have the weights now.

        Args:
            taken: whether any replica accepted the call.
            failed_elsewhere: engine keys of the replicas that failed the calls of other heads.
        """
        self._distrust_the_different(call, taken)
        if call.method != "collective_rpc":
            return
        if taken and self.shared.leaves_state(call.method, call.args):
            reached = [member for member, answer in zip(call.members, call.answers, strict=True) if _is_result(answer)]
            reached += self.find(set(call.called_elsewhere) - set(failed_elsewhere))
            engines = {member.engine_key for member in reached}
            for engine in self._has_weights:
                if engine not in engines:
                    self._has_weights[engine] = False
                elif call.completes_update:
                    self._has_weights[engine] = True
        self._release_updated()

    def _is_updated(self, engine: int) -> bool:
        """Whether an engine has the weights of the fleet."""
        has_weights = self._has_weights.get(engine)
        return not self.shared.weights_changed if has_weights is None else has_weights

    def _release_updated(self) -> None:
        """Let the replicas serve that waited for the weights which they have now."""
        for member in self.members:
            if WEIGHTS_CORDON in member.cordons and self._is_updated(member.engine_key):
                if member.report_synced is not None:
                    member.report_synced()
                self._hold_back(member, False)

    def _distrust_the_different(self, call: StageCall, taken: bool) -> None:
        """Distrust the replicas that accepted a call which the others refused, or the other way round."""
        for member, answer in zip(call.members, call.answers, strict=True):
            if isinstance(answer, ReplicaError) is taken and not isinstance(answer, NotAllowedError):
                if taken:
                    logger.error("Replica %s failed the call %s: %s", member.name, call.method, answer)
                    self.distrust(member, call.method)
                else:
                    self._distrust(member, f"it accepted the call {call.method}, which other replicas refused")

    def distrust(self, member: PoolMember, method: str) -> None:
        """Take out a replica that failed a call, unless it only goes on to wait for a complete weight update."""
        if method == "collective_rpc" and WEIGHTS_CORDON in member.cordons:
            return
        self._distrust(member, f"it failed the call {method}, which other replicas accepted")

    async def _catch_up(self, member: PoolMember, calls: list[EngineCall]) -> None:
        for method, args in calls:
            call = StageCall(self, method, args, [member], lambda taken: None)
            call.answers = [await self._call_one(member, call)]
            if call.failed:
                logger.error("Replica %s failed a call that it had missed: %s", member.name, call.answers[0])
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
            result = await _call_engine(member.client, member.remote, call.method, call.args)
        except ReplicaError as error:
            return error
        if _clears_prefix_cache(call.method, call.args, result):
            call.cleared.append(member)
            self._pool.cache_cleared(member)
        return result

    def find(self, engines: Collection[int]) -> list[PoolMember]:
        return [member for member in self.members if member.engine_key in engines]


async def _call_engine(client: StageClient, remote: bool, method: str, args: tuple[Any, ...]) -> Any:
    """Call an engine. Adapter files of a local engine are checked first, as a replica server does for a remote one."""
    if method == "add_lora" and not remote and (why := await asyncio.to_thread(adapter_mismatch, args[0])):
        raise AdapterFilesError(why)
    return await client.call(method, *args)


def _is_result(answer: Any) -> bool:
    return not isinstance(answer, ReplicaError)


def _is_failure(answer: Any) -> bool:
    """Whether an engine failed a call. It has not if its server did not allow the call."""
    return isinstance(answer, ReplicaError) and not isinstance(answer, NotAllowedError)


def _clears_prefix_cache(method: str, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a call cleared the engine's prefix cache. The engine's own report of that waits for its next step.

    Missing arguments have vLLM's default, which clears the cache.
    """
    match method:
        case "reset_prefix_cache":
            return bool(result)
        case "pause_scheduler" | "pause_generation":
            return len(args) < 2 or bool(args[1])
        case "sleep":
            return not args or bool(args[0] >= 1)
    return False
