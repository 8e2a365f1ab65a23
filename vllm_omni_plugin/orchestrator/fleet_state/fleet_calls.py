"""Operator calls: made to all engines in parallel, and recorded in the document that all heads have."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from vllm_omni_plugin.coordinator import ReplicaKey, Welcome
from vllm_omni_plugin.coordinator.protocol import call_effects
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState, check_size, is_later
from vllm_omni_plugin.coordinator.protocol.head_messages import CallDone, FleetCall, RelayedCall
from vllm_omni_plugin.errors import CoordinatorUnavailableError, NoReplicaError, ReplicaError, WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.fleet_state.call_session import MAX_CONFLICTS, CallSession, CoordinatorClient
from vllm_omni_plugin.orchestrator.fleet_state.fleet_document import FleetDocument, remote_members
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import AbortedElsewhere, notify
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.stage_calls import StageCall
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CoordinatorMessage
from vllm_omni_plugin.vllm_api.engine_messages.pause_state import PAUSE_CALLS

logger = init_logger(__name__)

_CACHE_CALLS = frozenset({"reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache"})
"""These succeed without replicas: the caches of a replica that comes later are empty."""

_DEPEND_ON_STATE = frozenset({"sleep", "wake_up", "release_kv_cache_memory"})
"""What these leave depends on the memory that sleeps before them, so that order matters."""

Work = Sequence["asyncio.Task[None]"]


class FleetCalls:
    """Makes this head's operator calls, and its part of other heads' calls. Lives on the orchestrator's loop.

    A head calls all engines that it reaches at the same time. If any accepts the call, the head tells the others which
    ones, and the document as it is now. They call what only they reach, and tell all replicas what these have missed.
    If another head has changed the document meanwhile, the call is made again, `MAX_CONFLICTS` times at most: the later
    version holds.
    """

    def __init__(self, orchestrator: Orchestrator, head_id: str = "", client: CoordinatorClient | None = None) -> None:
        self._orchestrator = orchestrator
        self._stages = orchestrator.stage_calls
        self._head_id = head_id
        self._document = FleetDocument(orchestrator, head_id)
        self.session = CallSession(head_id, client)
        # One change at a time, so that each changes the document that the coordinator has.
        self._changing = asyncio.Lock()
        # In this order calls begin; of those that pause or resume, the last one that has ended.
        self._orders, self._last_pause = itertools.count(1), 0
        # How often another head's document has replaced that of this head.
        self._changes_elsewhere = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> FleetState:
        """The document, as this head has it."""
        return self._document.state

    async def close(self) -> None:
        """Stop making and following calls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def call(self, method: str, args: tuple[Any, ...], stage_ids: Sequence[int]) -> list[Any]:
        """Make an operator call, see `CallReplicas`, and return the answers of the replicas that accepted it.

        Raises NoReplicaError; ReplicaError if no replica of a stage accepted it, or a node does not let heads make this
        call; CoordinatorUnavailableError if other heads cannot be notified, or it is unknown whether they were;
        StateTooLargeError.
        """
        lasts = call_effects.leaves_state(method, args)
        plain = None if self.session.is_alone else call_effects.encode(method, args)
        if lasts or plain is not None:
            await self._check_allowed()
        if plain is None and lasts and method not in call_effects.HEAD_CALLS and not self.session.is_alone:
            logger.warning(
                "The call %s is not sent to other heads: its arguments must be plain JSON of at most 128 KiB.", method
            )
        if method == "add_lora":
            check_size(self._document.after_call(method, args, stage_ids))
        for attempt in range(MAX_CONFLICTS):
            since, document = self._changes_elsewhere, None
            if attempt and method in _DEPEND_ON_STATE:
                document = self.state
                await self._restore_pauses(stage_ids)
            order = next(self._orders)
            calls = await self._call_engines(method, args, stage_ids)
            accepted = _accepted(calls, stage_ids)
            is_overtaken = partial(self._is_overtaken, since, document)
            if not accepted and document is not None and is_overtaken():
                # They were restored to what is no longer so.
                continue
            if not accepted or (plain is None and not lasts):
                break
            change = partial(self._after_call, method, args, accepted, calls, order) if lasts else None
            told = _told(calls.values(), "" if plain is None else method, plain or [], accepted)
            if await self._share(told, change, calls.values(), None if method == "collective_rpc" else is_overtaken):
                break
            # Engines may have run this call and that of another head in any order.
        else:
            if method in PAUSE_CALLS:
                await self._restore_pauses(stage_ids)
            raise CoordinatorUnavailableError(
                f"Other servers have changed the state of the fleet {MAX_CONFLICTS} times during this call of "
                f"{method}, which is not in effect. Please repeat it."
            )
        for call in calls.values():
            call.raise_if_refused()
        return [result for call in calls.values() for result in call.results]

    async def manage(self, action: str, key: ReplicaKey) -> None:
        """Tell the others that this head has drained, resumed or removed a replica. Returns, or raises, as `call`."""
        await self._check_allowed()
        told = FleetCall(0, call_effects.REMOVE, [list(key)]) if action == call_effects.REMOVE else FleetCall(0)
        await self._share(told, partial(self._document.after_action, action, key), ())

    def handle(self, message: CoordinatorMessage) -> None:
        """Other heads' calls and documents: do this head's part, adopt a later document, send a later own one."""
        self.session.handle(message)
        match message:
            case Welcome() if self.state.version:
                # A new coordinator does not know it.
                self.session.send(self.state)
            case FleetState() if is_later(message, self.state):
                self._spawn(_all_of(self._adopt(message, (), is_own=False)))
            case FleetState() if is_later(self.state, message):
                self.session.send(self.state)
            case RelayedCall() if message.head_id == self._head_id:
                if (sent := self.session.passed_on(message.call_id)) is not None:
                    sent.work = self._apply(message)
                    sent.taken.set_result(True)
            case RelayedCall():
                self._do_part(message)

    async def _check_allowed(self) -> None:
        await self.session.wait_synced()
        if self.session.refusal is not None:
            raise self.session.refusal

    async def _call_engines(self, method: str, args: tuple[Any, ...], stage_ids: Sequence[int]) -> dict[int, StageCall]:
        """Call the engines that this head reaches; take out those that failed what others accepted."""
        if method in call_effects.HEAD_CALLS:
            return {}
        calls = {stage_id: self._stages[stage_id].begin(method, args) for stage_id in stage_ids}
        if method not in _CACHE_CALLS and not any(call.called for call in calls.values()):
            # Not checked earlier: all may be lost while a call waits for the document, or is made again.
            raise NoReplicaError(f"No replica can take the call {method} right now. Please try again later.")
        await asyncio.gather(*(call.stage.send(call) for call in calls.values()))
        for stage_id in _accepted(calls, stage_ids):
            calls[stage_id].stage.take_out_failed(calls[stage_id])
        return calls

    async def _restore_pauses(self, stage_ids: Sequence[int]) -> None:
        """Bring engines to the document's pause and sleep, whatever overlapping calls have left."""
        await asyncio.gather(*(self._stages[stage_id].restore_pause() for stage_id in stage_ids))

    def _after_call(
        self, method: str, args: tuple[Any, ...], accepted: Sequence[int], calls: Mapping[int, StageCall], order: int
    ) -> FleetState:
        """The document after a call. Of two pauses or resumes the one that began later counts, whichever ends last."""
        if method in PAUSE_CALLS:
            if order < self._last_pause:
                accepted = ()
            self._last_pause = max(self._last_pause, order)
        fresh = [stage_id for stage_id, call in calls.items() if call.all_fresh]
        return self._document.after_call(method, args, accepted, fresh)

    async def _share(
        self,
        told: FleetCall,
        change: Callable[[], FleetState] | None,
        calls: Collection[StageCall],
        is_overtaken: Callable[[], bool] | None = None,
    ) -> bool:
        """Tell the other heads of a call, and let `change` return the document after it.

        Returns False if the call `is_overtaken`: another head has changed the document meanwhile, and this head has
        that document now. Without `is_overtaken` the change is made again, without a new call.
        Raises CoordinatorUnavailableError if it is unknown whether others have been told.
        """
        async with self._changing:
            while True:
                if change is not None:
                    if is_overtaken is not None and is_overtaken():
                        return False
                    base = self.state
                    told = replace(told, state=change(), base_version=base.version, base_head=base.head_id)
                try:
                    sent = self.session.tell(told)
                    if sent is None or await sent.taken:
                        break
                except CoordinatorUnavailableError:
                    # The operator gets an error, but engines have accepted the call.
                    self._spawn(_all_of(self._apply(told, is_own=False)))
                    _report_told(calls)
                    self.session.send(self.state)
                    raise
                if is_overtaken is not None:
                    return False
            work = self._apply(told) if sent is None else sent.work
            _report_told(calls)
        await asyncio.gather(*work)
        if sent is not None:
            await self.session.until_finished(sent, told.method or "of an operator")
        return True

    def _is_overtaken(self, since: int, document: FleetState | None) -> bool:
        """Whether another head has changed the document, or this one what engines were restored to."""
        return since != self._changes_elsewhere or document not in (None, self.state)

    def _do_part(self, message: RelayedCall) -> None:
        """Do this head's part of another head's call: call the engines that only this head reaches, then report."""
        calls: list[StageCall] = []
        work: list[asyncio.Task[None]] = []
        try:
            for stage, pool in zip(self._stages, self._orchestrator.stage_pools, strict=True):
                for member in stage.find(message.cleared):
                    pool.cache_cleared(member)
                for member in stage.find(message.failed):
                    stage.distrust(member, message.method or "of an operator")
            args = call_effects.decode(message.method, message.arguments) if message.method else ()
            if message.method == call_effects.ABORT_CLIENT_REQUESTS:
                update = AbortedElsewhere(args[0], Future())
                work.append(self._spawn(notify(self._orchestrator.front_end.give, update)))
            elif message.method == call_effects.REMOVE:
                self._remove_replica(args[0])
            elif message.method:
                stages = [stage for stage_id, stage in enumerate(self._stages) if stage_id in message.stages]
                calls = [stage.begin(message.method, args, {*message.reached, *message.failed}) for stage in stages]
                # They begin now, before any call that this head makes to change the document of this one.
                work += [self._spawn(call.stage.send(call)) for call in calls]
            called = [replica.engine_key for call in calls for replica in call.called]
            work += self._apply(message, called, is_own=False)
        except WireError as error:
            logger.error("An operator call of another head has no effect here: %s", error)
        finally:
            self._spawn(self._finish_part(message, calls, work))

    async def _finish_part(self, message: RelayedCall, calls: Sequence[StageCall], work: Work) -> None:
        try:
            await asyncio.gather(*work)
            for call in calls:
                call.stage.take_out_failed(call)
            _report_told(calls)
        finally:
            self.session.send(CallDone(message.call_id, message.head_id))

    def _remove_replica(self, key: ReplicaKey) -> None:
        """Another head has removed the replica, so this one leaves it, too."""
        for member in remote_members(self._orchestrator):
            if ReplicaKey.of(member) == key and member.leave is not None:
                # A head that is not attached cannot remove the replica. Another head has done so.
                with suppress(ReplicaError):
                    member.leave()

    def _apply(self, told: FleetCall, called: Collection[int] = (), is_own: bool = True) -> Work:
        """Adopt the document of a call that has changed it. Returns what must be waited for.

        Replicas with an engine key in `called` get the call now.
        """
        if told.state is None or not is_later(told.state, self.state):
            return ()
        return self._adopt(told.state, {*told.reached, *called}, is_own)

    def _adopt(self, state: FleetState, reached: Collection[int], is_own: bool) -> Work:
        work, update = self._document.adopt(state, reached)
        self._changes_elsewhere += not is_own
        if update is not None and not is_own:
            work.append(self._spawn(notify(self._orchestrator.front_end.give, update)))
        return work

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name="omni-fleet-calls")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("An operator call of another head failed here.", exc_info=error)


def _accepted(calls: Mapping[int, StageCall], stage_ids: Sequence[int]) -> list[int]:
    """The stages where an engine has accepted a call, and those without replicas: their first one must get it, too."""
    if not calls:
        return list(stage_ids)
    anywhere = any(call.results for call in calls.values())
    return [stage_id for stage_id, call in calls.items() if (call.results if call.called else anywhere)]


async def _all_of(work: Work) -> None:
    await asyncio.gather(*work)


def _report_told(calls: Collection[StageCall]) -> None:
    for call in calls:
        call.stage.report_told(call)


def _told(calls: Collection[StageCall], method: str, arguments: list[Any], stages: list[int]) -> FleetCall:
    """What the other heads must know of a call; `calls`: this head's part of it."""
    return FleetCall(
        0,
        method,
        arguments,
        stages,
        reached=[replica.engine_key for call in calls for replica in call.reached],
        failed=[replica.engine_key for call in calls if call.results for replica in call.failed],
        cleared=[engine for call in calls for engine in call.cleared],
    )
