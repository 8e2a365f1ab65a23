"""Operator calls. With several heads the coordinator numbers each call, and all heads follow it in that order."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

from vllm_omni_plugin.coordinator import HeadLeft, OmniCoordClientForHead, PeerWork, ReplicaKey, SessionLost, Welcome
from vllm_omni_plugin.coordinator.protocol.call_arguments import HEAD_CALLS, MANAGE_CALLS, decode, encode
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    CallDone,
    CallFinished,
    CallMessageFromHead,
    CallOutcome,
    CallRefused,
    FleetState,
    NumberedCall,
    OperatorCall,
    TakeOverCall,
)
from vllm_omni_plugin.errors import (
    CoordinatorUnavailableError,
    NoReplicaError,
    WireError,
)
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.fleet_state.fleet_snapshot import adopt, snapshot_of
from vllm_omni_plugin.orchestrator.fleet_state.ongoing_call import OngoingCall, notify_state_change
from vllm_omni_plugin.orchestrator.fleet_state.replica_actions import apply_action_by_key
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CoordinatorMessage
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError

logger = init_logger(__name__)

FIRST_STATE_TIMEOUT_S = 5.0
"""How long a head that has just started waits for the fleet's state."""
FOLLOW_TIMEOUT_S = 300.0
"""How long a caller waits for the other heads, which may have to call engines of their own node."""

_CACHE_CALLS = frozenset({"reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache"})
"""These succeed without replicas: the caches of a replica that comes later are empty."""

CoordinatorClient = Callable[[], OmniCoordClientForHead | None]


class FleetCalls:
    """Makes this head's operator calls, and follows those of other heads. Lives on the orchestrator's loop.

    All heads record a call when it arrives with its number. The caller sends it to the engines that it reaches and
    reports the outcome. The other heads send it to the engines that the caller did not name. A head that knows no
    other head needs no coordinator: it numbers its calls itself, and reports them to the coordinator later.

    Args:
        head_id: this head's id.
        client: returns this head's client of the coordinator, None before it exists. Without this argument there
            are no other heads.
    """

    def __init__(self, orchestrator: Orchestrator, head_id: str = "", client: CoordinatorClient | None = None) -> None:
        self._orchestrator = orchestrator
        self._stages = orchestrator.stage_calls
        self._head_id = head_id
        self._is_alone = client is None
        self._client = client or (lambda: None)
        self._in_session = False
        self._synced = asyncio.Event()
        self._others: set[str] = set()
        self._knows_others = client is None
        if client is None:
            self._synced.set()
        self._number = 0
        self._call_ids = itertools.count(1)
        # This head's own calls that have no number yet, by call id.
        self._unnumbered: dict[int, asyncio.Future[OngoingCall]] = {}
        # By number: own calls without an outcome, own calls that other heads still follow, calls of other heads.
        self._own: dict[int, OngoingCall] = {}
        self._finishing: dict[int, asyncio.Future[None]] = {}
        self._followed: dict[int, OngoingCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def refusal(self) -> CoordinatorUnavailableError | None:
        """Why operator calls are refused now; None if they are not. Safe to read from any thread."""
        if self._in_session or (self._knows_others and not self._others):
            return None
        return CoordinatorUnavailableError(
            "The coordinator of the fleet cannot be reached, so the other servers cannot be notified. "
            "Requests are served. Please try again later."
        )

    async def close(self) -> None:
        """Stop making and following calls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def handle(self, message: CoordinatorMessage) -> None:
        """Handle a message of the coordinator about other heads or their calls."""
        match message:
            case Welcome():
                self._forget_calls()
                self._others, self._knows_others = set(message.heads), True
                self._in_session = True
                # The fleet's state follows.
                self._synced.clear()
            case PeerWork():
                self._others.add(message.head_id)
            case HeadLeft():
                self._others.discard(message.head_id)
            case SessionLost():
                self._in_session = False
                self._synced.set()
                self._forget_calls()
            case NumberedCall():
                self._begin_numbered(message)
            case TakeOverCall():
                self._take_over(message.call)
            case CallOutcome():
                self._apply_outcome(message)
            case CallFinished():
                if message.number in self._finishing:
                    self._finishing.pop(message.number).set_result(None)
            case CallRefused():
                if (caller := self._caller(message.call_id)) is not None:
                    caller.set_exception(CoordinatorUnavailableError(message.reason))
            case FleetState():
                self._adopt_state(message)

    async def wait_synced(self) -> bool:
        """Wait until this head has the fleet's state, or cannot get it. Returns whether it has the state."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_STATE_TIMEOUT_S):
                await self._synced.wait()
        return self._in_session or self._is_alone

    async def call(self, method: str, args: tuple[Any, ...], stage_ids: Sequence[int]) -> list[Any]:
        """Make an operator call, see `CallReplicas`; all heads end it with the same outcome.

        Returns:
            The answers of the replicas that accepted it.

        Raises:
            NoReplicaError: there is no replica.
            ReplicaError: no replica of a stage accepted it.
            CoordinatorUnavailableError: other heads cannot be notified, or it is unknown whether they were.
        """
        stages = [self._stages[stage_id] for stage_id in stage_ids]
        if method not in HEAD_CALLS and not any(stage.members for stage in stages):
            if method in _CACHE_CALLS:
                return []
            raise NoReplicaError(f"No replica can take the call {method} right now. Please try again later.")
        arguments = None if self._is_alone else encode(method, args)
        if arguments is not None:
            call = await self._begin_own(method, arguments, stage_ids)
        else:
            if not self._is_alone and (method in HEAD_CALLS or stages[0].shared.leaves_state(method, args)):
                logger.warning("Other heads cannot be notified of this call of %s.", method)
            call = OngoingCall.begin(stages, method, args)
        await self._settle(call)
        return call.results()

    async def _begin_own(self, method: str, arguments: list[Any], stage_ids: Sequence[int]) -> OngoingCall:
        """Begin a call once it has its number; `arguments`: see `call_arguments.encode`."""
        stages = [self._stages[stage_id] for stage_id in stage_ids]
        await self.wait_synced()
        if self.refusal is not None:
            raise self.refusal
        if not self._in_session:
            self._number += 1
            return OngoingCall.begin(stages, method, decode(method, arguments))
        call_id = next(self._call_ids)
        numbered: asyncio.Future[OngoingCall] = asyncio.get_running_loop().create_future()
        self._unnumbered[call_id] = numbered
        with ExitStack() as stack:
            stack.callback(self._unnumbered.pop, call_id)
            reached = [engine for stage in stages for engine in stack.enter_context(stage.unnumbered())]
            if not self._send(OperatorCall(call_id, method, arguments, list(stage_ids), reached)):
                raise _lost()
            return await numbered

    async def _settle(self, call: OngoingCall) -> list[bool]:
        """Wait for the answers to a call of this head, and report the outcome to the other heads.

        Returns:
            For each stage of the call, whether any engine accepted it.

        Raises:
            CoordinatorUnavailableError: see `call`.
        """
        try:
            accepted = await call.outcome()
        except BaseException:
            if call.number:
                self._spawn(self._withdraw(call))
            raise
        if call.number:
            await self._finish(call, accepted)
        return accepted

    async def _finish(self, call: OngoingCall, accepted: list[bool]) -> None:
        """Report the outcome of a call, for each of its stages, and wait until the other heads have followed it.

        Raises:
            CoordinatorUnavailableError: it is unknown whether the other heads were notified.
        """
        failed = [m.engine_key for each, ok in zip(call.calls, accepted, strict=True) if ok for m in each.failed]
        if any(accepted):
            failed += call.unreached
            self._distrust(call.unreached, call.method)
        cleared = [member.engine_key for each in call.calls for member in each.cleared]
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            # After a lost session this head may have been asked to make the call again, under the same number.
            if self._own.get(call.number) is not call:
                raise _lost()
            del self._own[call.number]
            self._finishing[call.number] = finished
            if not self._send(CallOutcome(call.number, accepted, failed, cleared)):
                raise _lost()
            async with asyncio.timeout(FOLLOW_TIMEOUT_S):
                await finished
        except TimeoutError:
            logger.warning("Not all other heads have followed the call %s.", call.method)
        except CoordinatorUnavailableError:
            # AsyncLLM takes this error for a failed call, but the fleet counts the call as accepted for now.
            self._spawn(self._notify_state_change(call))
            raise
        finally:
            if self._finishing.get(call.number) is finished:
                del self._finishing[call.number]

    def share_replica_action(self, action: str, key: ReplicaKey, reply: "Future[None]") -> None:
        """This head has drained, resumed or removed a replica: answer `reply` when all other heads have, too."""

        def answer_if_closed(_: "asyncio.Task[None]") -> None:
            if not reply.done():
                reply.set_exception(QueueClosedError("The server is about to end."))

        self._spawn(self._share_replica_action(action, key, reply)).add_done_callback(answer_if_closed)

    async def _share_replica_action(self, action: str, key: ReplicaKey, reply: "Future[None]") -> None:
        try:
            await self._settle(await self._begin_own(action, [list(key)], []))
        except Exception as error:
            reply.set_exception(error)
        else:
            reply.set_result(None)

    def _begin_numbered(self, numbered: NumberedCall) -> None:
        self._number = max(self._number, numbered.number)
        if numbered.method in MANAGE_CALLS:
            apply_action_by_key(self._orchestrator, numbered.method, decode(numbered.method, numbered.arguments)[0])
        is_own = numbered.head_id == self._head_id
        call = self._begin(numbered, None if is_own else numbered.called_engines)
        if not is_own:
            self._others.add(numbered.head_id)
            self._followed[numbered.number] = call
            return
        self._own[numbered.number] = call
        call.unreached = set(numbered.called_engines) - {
            m.engine_key for each in call.calls for m in each.stage.members
        }
        if (caller := self._caller(numbered.call_id)) is not None:
            caller.set_result(call)
        else:
            # A resync on the same connection has failed the caller, but the other heads follow the call.
            self._spawn(self._settle_taken_over(call, in_snapshot=False))

    def _caller(self, call_id: int) -> "asyncio.Future[OngoingCall] | None":
        """What waits for the number of a call of this head; None if it does not wait any more."""
        caller = self._unnumbered.get(call_id)
        return None if caller is None or caller.done() else caller

    def _take_over(self, numbered: NumberedCall) -> None:
        logger.warning("A head was lost during its call %s: this head makes the call again.", numbered.method)
        known = self._followed.pop(numbered.number, None)
        call = self._begin(numbered, None) if known is None else known.resend()
        self._own[numbered.number] = call
        self._spawn(self._settle_taken_over(call, in_snapshot=known is None))

    def _begin(self, numbered: NumberedCall, called_elsewhere: Sequence[int] | None) -> OngoingCall:
        args = decode(numbered.method, numbered.arguments)
        if max(numbered.stages, default=0) >= len(self._stages):
            raise WireError(f"a call of stages {numbered.stages}: this head has {len(self._stages)}")
        engines = None if called_elsewhere is None else set(called_elsewhere)
        stages = [self._stages[stage_id] for stage_id in numbered.stages]
        return OngoingCall.begin(stages, numbered.method, args, engines, numbered.number)

    async def _settle_taken_over(self, call: OngoingCall, in_snapshot: bool) -> None:
        """Settle a call whose caller was lost or has failed.

        Args:
            in_snapshot: the state that this head adopted contains the call.
        """
        # If the session is lost again, `_finish` has notified AsyncLLM.
        with suppress(CoordinatorUnavailableError):
            accepted = await self._settle(call)
            if any(accepted):
                await self._notify_state_change(call)
            if in_snapshot and not all(accepted):
                self._resync()

    async def _withdraw(self, call: OngoingCall) -> None:
        with suppress(CoordinatorUnavailableError):
            await self._finish(call, [False] * len(call.calls))

    def _apply_outcome(self, outcome: CallOutcome) -> None:
        call = self._followed.pop(outcome.number, None)
        if call is None and not all(outcome.taken):
            # The state that this head adopted contains the call, but no engine has accepted it.
            self._resync()
            return
        if call is not None:
            for each, accepted in zip(call.calls, outcome.taken, strict=True):
                each.settle(accepted)
        for stage, pool in zip(self._stages, self._orchestrator.stage_pools, strict=True):
            for member in stage.find(outcome.cleared):
                pool.cache_cleared(member)
        self._distrust(outcome.failed, call.method if call is not None else "of another head")
        self._spawn(self._follow(call, outcome))

    def _distrust(self, engines: Collection[int], method: str) -> None:
        for stage in self._stages:
            for member in stage.find(engines):
                stage.distrust(member, method)

    async def _follow(self, call: OngoingCall | None, outcome: CallOutcome) -> None:
        if call is not None:
            await call.sending
            for each, accepted in zip(call.calls, outcome.taken, strict=True):
                each.stage.conclude(each, accepted, outcome.failed)
            if any(outcome.taken):
                await self._notify_state_change(call)
        self._send(CallDone(outcome.number))

    def _forget_calls(self) -> None:
        """Count the calls in progress as accepted; the next state of the fleet will contain their true outcomes."""
        for call in (*self._own.values(), *self._followed.values()):
            call.settle(True)
        for call in self._followed.values():
            self._spawn(self._notify_state_change(call))
        self._own.clear()
        self._followed.clear()
        futures: list[asyncio.Future[Any]] = [*self._unnumbered.values(), *self._finishing.values()]
        for future in futures:
            if not future.done():
                future.set_exception(_lost())

    def _adopt_state(self, state: FleetState) -> None:
        try:
            if state.number < self._number:
                # The coordinator has restarted and does not know the last call that this head followed.
                self._send(snapshot_of(self._orchestrator, self._number))
            else:
                updates = adopt(self._orchestrator, state)
                self._number = state.number
                for update in updates:
                    self._spawn(update)
        except WireError as error:
            logger.error("The state of the fleet cannot be adopted: %s", error)
        finally:
            self._synced.set()

    async def _notify_state_change(self, call: OngoingCall) -> None:
        await notify_state_change(self._orchestrator.front_end.give, call.server_update())

    def _send(self, message: CallMessageFromHead) -> bool:
        client = self._client()
        return client is not None and client.send(message)

    def _resync(self) -> None:
        client = self._client()
        if client is not None:
            client.resync()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name="omni-fleet-calls")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A call of another head could not be followed.", exc_info=error)


def _lost() -> CoordinatorUnavailableError:
    return CoordinatorUnavailableError(
        "The coordinator of the fleet was lost during the call, so other servers may not know of it. Please repeat it."
    )
