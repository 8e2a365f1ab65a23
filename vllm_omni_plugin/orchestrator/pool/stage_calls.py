"""Calls to the replicas of one stage, and what each of them must still be told."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from vllm_omni_plugin.coordinator.protocol.call_effects import calls_between
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD, ReplicaState, StageState, is_later
from vllm_omni_plugin.errors import AdapterFilesError, NoReplicaError, NotAllowedError, ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool.pool_member import ASLEEP_CORDON, WEIGHTS_CORDON, PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.replicas.links.engine_client import LONG_CALLS, EngineClient
from vllm_omni_plugin.vllm_api.engine_messages.adapter import adapter_mismatch
from vllm_omni_plugin.vllm_api.engine_messages.pause_state import PAUSE_CALLS, EngineCall

logger = init_logger(__name__)

_RESUMING = frozenset({"resume_scheduler", "wake_up"})


class CalledReplica(NamedTuple):
    """A replica as it was when a call began; it may be lost and attached to again before the call ends."""

    member: PoolMember
    engine_key: int
    client: EngineClient


@dataclass(eq=False, slots=True)
class StageCall:
    """One call of a method of vLLM's engine core to replicas of one stage, in order of their ids.

    `all_fresh`: none has the weights of the fleet. An answer is a `ReplicaError` if a call failed. `cleared` are engine
    keys of those that cleared their prefix caches for the call.
    """

    stage: "StageCalls"
    method: str
    args: tuple[Any, ...]
    called: list[CalledReplica]
    all_fresh: bool
    answers: list[tuple[CalledReplica, Any]] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)

    @property
    def results(self) -> list[Any]:
        """The answers of the replicas that accepted the call."""
        return [answer for _, answer in self.answers if not isinstance(answer, ReplicaError)]

    @property
    def reached(self) -> list[CalledReplica]:
        """The replicas that accepted the call."""
        return [replica for replica, answer in self.answers if not isinstance(answer, ReplicaError)]

    @property
    def failed(self) -> list[CalledReplica]:
        """The replicas that failed it. One whose server did not allow the call has not."""
        return [
            replica
            for replica, answer in self.answers
            if isinstance(answer, ReplicaError) and not isinstance(answer, NotAllowedError)
        ]

    def raise_if_refused(self) -> None:
        """Raise `ReplicaError` if no replica accepted the call, or the server of one does not let heads make it.

        If all were lost meanwhile, none has refused it, and the call may be repeated: `NoReplicaError`.
        """
        if self.called and not self.results:
            error = self.answers[0][1]
            if all(replica.member.client is not replica.client for replica in self.called):
                raise NoReplicaError(f"No replica answered the call {self.method}: {error}. Please try again later.")
            raise error
        for _, answer in self.answers:
            if isinstance(answer, NotAllowedError):
                raise answer


class StageCalls:
    """Calls to the replicas of one stage, and the state that they should have. Lives on the orchestrator's loop.

    Cordoned replicas are called, too. `distrust` is called with one that failed a call which another one accepted, and
    the reason; `cordon_for_weights` with one and whether it must wait for a weight update before it serves;
    `uncordon` with each one that is found asleep, when an operator has said if engines pause or sleep.
    """

    def __init__(
        self,
        pool: StagePool,
        distrust: Callable[[PoolMember, str], None],
        cordon_for_weights: Callable[[PoolMember, bool], None],
        uncordon: Callable[[PoolMember, str], None],
    ) -> None:
        self._pool = pool
        self._distrust = distrust
        self._cordon_for_weights = cordon_for_weights
        self._uncordon = uncordon
        self.wanted = NOTHING_TOLD
        # A replica has the weights of an update that only heads knew which are gone.
        self._found_updated = False
        # Open calls of this head during which engines compute no requests.
        self._halting = 0
        self._catching_up: dict[PoolMember, asyncio.Task[None]] = {}

    @property
    def members(self) -> list[PoolMember]:
        return [member for member in self._pool.members if member.client is not None]

    @property
    def state(self) -> StageState:
        return self.wanted.state

    def is_halted(self) -> bool:
        """Whether an operator call keeps the engines from computing requests: a long one, a pause or a sleep."""
        return self._halting > 0 or self.state.is_paused or any(member.is_busy for member in self.members)

    async def bring_up_to_date(self, member: PoolMember, client: EngineClient, is_resting: bool) -> bool:
        """Make the calls that an attaching replica, which was told `PoolMember.told`, has missed.

        If it `is_resting`, paused or asleep, it stays so unless an operator has ended that meanwhile. Returns whether
        it has the weights of the others, or must wait for the next complete update. After a ReplicaError it must not
        serve.
        """
        while calls := self._missing(member, is_resting):
            wanted = self.wanted
            for group in _groups(calls):
                await _call_engine(client, member.remote, group)
            if is_later(wanted, member.told):
                member.told = _told(wanted, member.told.state.weights)
            is_resting = wanted.state.is_paused
        told = member.told.state
        if told.weights and not (told.are_files or self._found_updated):
            self._found_updated = True
            self._update_cordons()
        return self._is_updated(member, self.state)

    def begin(self, method: str, args: tuple[Any, ...], called_elsewhere: Collection[int] = ()) -> StageCall:
        """Choose the replicas to be called by `send`, but not those that the call of another head reaches."""
        called = [
            CalledReplica(member, member.engine_key, member.client)
            for member in self._pool.members
            if member.client is not None and member.engine_key not in called_elsewhere
        ]
        all_fresh = all(WEIGHTS_CORDON in member.cordons for member in self.members)
        return StageCall(self, method, args, called, all_fresh)

    async def send(self, call: StageCall) -> None:
        with self._halted() if call.method in LONG_CALLS or call.method in PAUSE_CALLS else nullcontext():
            answers = await asyncio.gather(*(self._call_one(replica, call) for replica in call.called))
        call.answers = list(zip(call.called, answers, strict=True))

    async def restore_pause(self) -> None:
        """Bring all engines to the pause and sleep that they should have, from any. One that refuses stays as it is."""
        with self._halted():
            await asyncio.gather(*(self._restore_pause(member) for member in self.members))

    @contextmanager
    def _halted(self) -> Iterator[None]:
        """While a call may keep engines from computing requests."""
        self._halting += 1
        try:
            yield
        finally:
            self._halting -= 1
            self._pool.restart_silence()

    def take_out_failed(self, call: StageCall) -> None:
        """Distrust the replicas that failed a call which others accepted."""
        for replica, answer in call.answers:
            member = replica.member
            if replica in call.failed and member.client is replica.client:
                logger.error("Replica %s failed the call %s: %s", member.name, call.method, answer)
                self.distrust(member, call.method)

    def adopt(self, wanted: ReplicaState, reached: Collection[int]) -> list["asyncio.Task[None]"]:
        """Replace the state that replicas should have; returns tasks that tell the replicas what they have missed.

        Those with an engine key in `reached` have got the call that changed it, or get it now.
        """
        before, self.wanted = self.wanted, wanted
        if wanted.state == before.state:
            return []
        for member in self.members:
            if wanted.state.pause.was_set:
                self._uncordon(member, ASLEEP_CORDON)
            if member.engine_key in reached:
                weights = member.told.state.weights
                if wanted.state.weights != before.state.weights and (
                    wanted.state.is_complete or self._is_updated(member, before.state)
                ):
                    weights = wanted.state.weights
                member.told = _told(wanted, weights)
        self._update_cordons()
        self._pool.restart_silence()
        return [self._catch_up(member) for member in self.members if self._missing(member, None)]

    def report_told(self, call: StageCall) -> None:
        """Tell the servers of the replicas that accepted a call which state these have now."""
        for member, _, client in call.reached:
            if member.client is client and member.report_told is not None:
                member.report_told(member.told)

    def told_elsewhere(self, member: PoolMember, told: ReplicaState) -> None:
        """Another head has told a replica something."""
        if is_later(told, member.told):
            member.told = told
            self._update_cordons()

    def set_busy(self, member: PoolMember, is_busy: bool) -> None:
        """Another head, or this one, has begun or ended a call that may block the engine for long."""
        member.is_busy = is_busy
        self._pool.restart_silence()

    def distrust(self, member: PoolMember, method: str) -> None:
        """Take out a replica that failed a call, unless it only goes on to wait for a complete weight update."""
        if method != "collective_rpc" or WEIGHTS_CORDON not in member.cordons:
            self._distrust(member, f"it failed the call {method}, which other replicas accepted")

    def find(self, engines: Collection[int]) -> list[PoolMember]:
        return [member for member in self.members if member.engine_key in engines]

    def _missing(self, member: PoolMember, is_resting: bool | None) -> list[EngineCall]:
        """The calls that a replica has missed. `is_resting`: whether its engine rests; None: as it was told."""
        if is_later(member.told, self.wanted):
            # Another head has told it something that this head does not know yet.
            return []
        told = member.told.state
        return calls_between(told, self.state, told.is_paused if is_resting is None else is_resting)

    def _is_updated(self, member: PoolMember, state: StageState) -> bool:
        """Whether an engine has the fleet's weights; a fresh engine has, if they are those of the files."""
        weights = member.told.state.weights
        if not state.weights:
            return bool(weights) or not self._found_updated
        return weights == state.weights or (state.are_files and not weights)

    def _update_cordons(self) -> None:
        """Hold the replicas back that do not have the weights of the fleet, and no others."""
        for member in self.members:
            self._cordon_for_weights(member, not self._is_updated(member, self.state))

    def _catch_up(self, member: PoolMember) -> "asyncio.Task[None]":
        task = self._catching_up.get(member)
        if task is None:
            task = self._catching_up[member] = asyncio.create_task(self._tell_missing(member), name="omni-catch-up")
            task.add_done_callback(lambda _: self._catching_up.pop(member))
        return task

    async def _tell_missing(self, member: PoolMember) -> None:
        """Make the calls that an engine has missed; one that fails takes it out, one that its node forbids does not."""
        client = member.client
        while client is not None and client is member.client and (calls := self._missing(member, None)):
            wanted = self.wanted
            for group in _groups(calls):
                try:
                    await _call_engine(client, member.remote, group)
                except NotAllowedError as error:
                    logger.warning("Replica %s serves without an operator call that it missed: %s", member.name, error)
                except ReplicaError as error:
                    logger.error("Replica %s failed an operator call that it had missed: %s", member.name, error)
                    if client is member.client:
                        self.distrust(member, group[0][0])
                    return
            if client is not member.client:
                # It is attached anew, and has said what it was told.
                return
            if is_later(wanted, member.told):
                member.told = _told(wanted, member.told.state.weights)
                if member.report_told is not None:
                    member.report_told(member.told)

    async def _restore_pause(self, member: PoolMember) -> None:
        if (client := member.client) is not None:
            with suppress(ReplicaError):
                for group in _groups([("wake_up", (None,)), *self.state.pause.replay()]):
                    await _call_engine(client, member.remote, group)

    async def _call_one(self, replica: CalledReplica, call: StageCall) -> Any:
        """One engine's answer, or its error; after any calls that it still lacked."""
        member, engine_key, client = replica
        if (catching_up := self._catching_up.get(member)) is not None:
            await asyncio.wait([catching_up])
        try:
            [result] = await _call_engine(client, member.remote, [(call.method, call.args)])
        except ReplicaError as error:
            return error
        if _clears_prefix_cache(call.method, call.args, result):
            call.cleared.append(engine_key)
            self._pool.cache_cleared(member)
        return result


def _told(wanted: ReplicaState, weights: str) -> ReplicaState:
    """What a replica with these weights was told when it has got everything else."""
    return replace(wanted, state=replace(wanted.state, weights=weights))


def _groups(calls: list[EngineCall]) -> Iterator[list[EngineCall]]:
    """Calls that are sent at once: each that may resume, and the next one, which may pause.

    An engine makes all calls that have arrived before its next step, so it computes nothing between these.
    """
    group: list[EngineCall] = []
    for call in calls:
        group.append(call)
        if call[0] not in _RESUMING:
            yield group
            group = []
    if group:
        yield group


async def _call_engine(client: EngineClient, remote: bool, calls: list[EngineCall]) -> list[Any]:
    """Make calls at once. Adapter files of a local engine are checked first; a replica server does so itself."""
    method, args = calls[0]
    if method == "add_lora" and not remote and (why := await asyncio.to_thread(adapter_mismatch, args[0])):
        raise AdapterFilesError(why)
    return await asyncio.gather(*(client.call(method, *args) for method, args in calls))


def _clears_prefix_cache(method: str, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a call cleared the prefix cache, as is vLLM's default. The engine reports that only at its next step."""
    match method:
        case "reset_prefix_cache":
            return bool(result)
        case "pause_scheduler" | "pause_generation":
            return len(args) < 2 or bool(args[1])
        case "sleep":
            return not args or bool(args[0] >= 1)
        case "release_kv_cache_memory":
            return True
    return False
