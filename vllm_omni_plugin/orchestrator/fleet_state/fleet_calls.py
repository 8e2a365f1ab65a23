"""Operators' calls: in a fleet of several heads each has a number of the coordinator, and all heads follow in order."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

from vllm_omni_plugin.coordinator import HeadLeft, OmniCoordClientForHead, PeerWork, ReplicaKey, SessionLost, Welcome
from vllm_omni_plugin.coordinator.protocol.call_arguments import FORGET_LORA, MANAGE_CALLS, decode, encode
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
from vllm_omni_plugin.orchestrator.fleet_state.fleet_snapshot import adopt, manage_by_key, snapshot_of
from vllm_omni_plugin.orchestrator.fleet_state.ongoing_call import OngoingCall, tell
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CoordinatorMessage
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError

logger = init_logger(__name__)

FIRST_S = 5.0
"""Seconds that a head which has just started waits for the fleet's state at most."""
FOLLOW_S = 300.0
"""Seconds that other heads have for what only they can do, such as calling engines of their own process."""

_CACHE_CALLS = frozenset({"reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache"})
"""Done where there is no replica: one that comes later comes with empty caches."""

CoordinatorClient = Callable[[], OmniCoordClientForHead | None]


class FleetCalls:
    """Makes this head's calls, and follows those of other heads. Lives on the orchestrator's loop.

    A call is recorded by all heads when it comes with its number. Its caller sends it to the engines that it reaches
    and says what became of it; the others send it to those that the caller did not name. A head that knows of no other
    needs no coordinator: it numbers its calls itself, and tells the coordinator when there is one.

    Args:
        orchestrator: this head's.
        head_id: the head's id.
        client: returns the way to the coordinator, None before there is one; None: there cannot be other heads.
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
        # This head's own calls: by call id until there is a number, then by number.
        self._asked: dict[int, asyncio.Future[OngoingCall]] = {}
        self._own: dict[int, OngoingCall] = {}
        self._finishing: dict[int, asyncio.Future[None]] = {}
        # Those of other heads that have no outcome yet, by number.
        self._followed: dict[int, OngoingCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def refusal(self) -> CoordinatorUnavailableError | None:
        """Why an operator's call is refused now; None if it is not. Safe to read from any thread."""
        if self._in_session or (self._knows_others and not self._others):
            return None
        return CoordinatorUnavailableError(
            "The coordinator of the fleet cannot be reached, and without it other servers cannot be told. "
            "Requests are served. Please try again later."
        )

    async def close(self) -> None:
        """Stop making and following calls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def take(self, message: CoordinatorMessage) -> None:
        """The coordinator says something of other heads, or of calls."""
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
                self._numbered(message)
            case TakeOverCall():
                self._take_over(message.call)
            case CallOutcome():
                self._outcome(message)
            case CallFinished():
                if message.number in self._finishing:
                    self._finishing.pop(message.number).set_result(None)
            case CallRefused():
                self._asked[message.call_id].set_exception(CoordinatorUnavailableError(message.reason))
            case FleetState():
                self._take_state(message)

    async def synced(self) -> bool:
        """Returns when this head knows what the fleet was told before, or cannot learn it: whether it does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await self._synced.wait()
        return self._in_session or self._is_alone

    async def call(self, method: str, args: tuple[Any, ...], stage_ids: Sequence[int]) -> list[Any]:
        """Make a call as `CallReplicas` says, and see that all heads come to the same end of it.

        Returns:
            What the replicas answered that took it.

        Raises:
            NoReplicaError: there is none.
            ReplicaError: none of a stage took it.
            CoordinatorUnavailableError: other heads cannot be told, or it is not known whether they have been.
        """
        stages = [self._stages[stage_id] for stage_id in stage_ids]
        if method != FORGET_LORA and not any(stage.members for stage in stages):
            if method in _CACHE_CALLS:
                return []
            raise NoReplicaError(f"No replica can take the call {method} right now. Please try again later.")
        arguments = None if self._is_alone else encode(method, args)
        if arguments is not None:
            begun = await self._begin_own(method, arguments, stage_ids)
        else:
            if not self._is_alone and stages[0].shared.leaves_state(method, args):
                logger.warning("Other heads cannot be told of this call of %s.", method)
            begun = OngoingCall.begin(stages, method, args)
        await self._settle(begun)
        return begun.results()

    async def _begin_own(self, method: str, arguments: list[Any], stage_ids: Sequence[int]) -> OngoingCall:
        """Begin a call when its turn among those of all heads has come; for `arguments` see `call_arguments.encode`."""
        stages = [self._stages[stage_id] for stage_id in stage_ids]
        await self.synced()
        if self.refusal is not None:
            raise self.refusal
        if not self._in_session:
            self._number += 1
            return OngoingCall.begin(stages, method, decode(method, arguments))
        call_id = next(self._call_ids)
        numbered: asyncio.Future[OngoingCall] = asyncio.get_running_loop().create_future()
        self._asked[call_id] = numbered
        with ExitStack() as stack:
            stack.callback(self._asked.pop, call_id)
            told = [engine for stage in stages for engine in stack.enter_context(stage.unnumbered())]
            if not self._say(OperatorCall(call_id, method, arguments, list(stage_ids), told)):
                raise _lost()
            return await numbered

    async def _settle(self, begun: OngoingCall) -> list[bool]:
        """Wait for the answers to a call that this head makes, and tell the others what became of it.

        Returns:
            For each of its stages, whether any engine took it.

        Raises:
            CoordinatorUnavailableError: see `call`.
        """
        try:
            taken = await begun.taken()
        except BaseException:
            if begun.number:
                self._spawn(self._withdraw(begun))
            raise
        if begun.number:
            await self._finish(begun, taken)
        return taken

    async def _finish(self, begun: OngoingCall, taken: list[bool]) -> None:
        """Tell the other heads what became of a call; returns when they have done their part.

        Args:
            begun: the call.
            taken: for each of its stages, whether any engine took it.

        Raises:
            CoordinatorUnavailableError: it is not known whether they have been told.
        """
        failed = [m.engine_key for call, took in zip(begun.calls, taken, strict=True) if took for m in call.failed]
        if any(taken):
            failed += begun.unreached
            self._distrust(begun.unreached, begun.method)
        cleared = [member.engine_key for call in begun.calls for member in call.cleared]
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            # One that was lost and taken over again since is another call of the same number.
            if self._own.get(begun.number) is not begun:
                raise _lost()
            del self._own[begun.number]
            self._finishing[begun.number] = finished
            if not self._say(CallOutcome(begun.number, taken, failed, cleared)):
                raise _lost()
            async with asyncio.timeout(FOLLOW_S):
                await finished
        except TimeoutError:
            logger.warning("Not all other heads have followed the call %s.", begun.method)
        except CoordinatorUnavailableError:
            # AsyncLLM's side takes this for a failure, and the fleet counts the call as taken until it knows better.
            self._spawn(self._tell_front(begun))
            raise
        finally:
            if self._finishing.get(begun.number) is finished:
                del self._finishing[begun.number]

    def managed(self, action: str, key: ReplicaKey, reply: "Future[None]") -> None:
        """This head has done what an operator wants with a replica. Answers when all others have done so, too."""

        def answer_if_closed(_: "asyncio.Task[None]") -> None:
            if not reply.done():
                reply.set_exception(QueueClosedError("The server is about to end."))

        self._spawn(self._manage(action, key, reply)).add_done_callback(answer_if_closed)

    async def _manage(self, action: str, key: ReplicaKey, reply: "Future[None]") -> None:
        try:
            await self._settle(await self._begin_own(action, [list(key)], []))
        except Exception as error:
            reply.set_exception(error)
        else:
            reply.set_result(None)

    def _numbered(self, call: NumberedCall) -> None:
        self._number = max(self._number, call.number)
        if call.method in MANAGE_CALLS:
            manage_by_key(self._orchestrator, call.method, decode(call.method, call.arguments)[0])
        own = call.head_id == self._head_id
        begun = self._begin(call, None if own else call.called_engines)
        if not own:
            self._others.add(call.head_id)
            self._followed[call.number] = begun
            return
        self._own[call.number] = begun
        begun.unreached = set(call.called_engines) - {m.engine_key for call in begun.calls for m in call.stage.members}
        self._asked[call.call_id].set_result(begun)

    def _take_over(self, call: NumberedCall) -> None:
        logger.warning("A head was lost during its call %s: it is made again.", call.method)
        known = self._followed.pop(call.number, None)
        begun = self._begin(call, None) if known is None else known.again()
        self._own[call.number] = begun
        self._spawn(self._carry_through(begun, in_snapshot=known is None))

    def _begin(self, call: NumberedCall, told: Sequence[int] | None) -> OngoingCall:
        args = decode(call.method, call.arguments)
        if max(call.stages, default=0) >= len(self._stages):
            raise WireError(f"a call of stages {call.stages}: this head has {len(self._stages)}")
        engines = None if told is None else set(told)
        stages = [self._stages[stage_id] for stage_id in call.stages]
        return OngoingCall.begin(stages, call.method, args, engines, call.number)

    async def _carry_through(self, begun: OngoingCall, in_snapshot: bool) -> None:
        """Be the caller of a call whose head was lost.

        Args:
            begun: the call.
            in_snapshot: whether the state that this head adopted holds it, too.
        """
        # Where it is lost again, `_finish` has told AsyncLLM's side.
        with suppress(CoordinatorUnavailableError):
            taken = await self._settle(begun)
            if any(taken):
                await self._tell_front(begun)
            if in_snapshot and not all(taken):
                self._resync()

    async def _withdraw(self, begun: OngoingCall) -> None:
        with suppress(CoordinatorUnavailableError):
            await self._finish(begun, [False] * len(begun.calls))

    def _outcome(self, outcome: CallOutcome) -> None:
        begun = self._followed.pop(outcome.number, None)
        if begun is None and not all(outcome.taken):
            # The state that this head adopted holds the call, which nobody has taken.
            self._resync()
            return
        if begun is not None:
            for call, taken in zip(begun.calls, outcome.taken, strict=True):
                call.settle(taken)
        for stage, pool in zip(self._stages, self._orchestrator.stage_pools, strict=True):
            for member in stage.find(outcome.cleared):
                pool.cache_cleared(member)
        self._distrust(outcome.failed, begun.method if begun is not None else "of another head")
        self._spawn(self._follow(begun, outcome))

    def _distrust(self, engines: Collection[int], method: str) -> None:
        for stage in self._stages:
            for member in stage.find(engines):
                stage.distrust(member, method)

    async def _follow(self, begun: OngoingCall | None, outcome: CallOutcome) -> None:
        if begun is not None:
            await begun.sending
            for call, taken in zip(begun.calls, outcome.taken, strict=True):
                call.stage.distrust_the_different(call, taken)
            if any(outcome.taken):
                await self._tell_front(begun)
        self._say(CallDone(outcome.number))

    def _forget_calls(self) -> None:
        """What becomes of calls under way is for the next state to tell; until then they count as taken."""
        for begun in (*self._own.values(), *self._followed.values()):
            begun.settle(True)
        for begun in self._followed.values():
            self._spawn(self._tell_front(begun))
        self._own.clear()
        self._followed.clear()
        waits: list[asyncio.Future[Any]] = [*self._asked.values(), *self._finishing.values()]
        for waiting in waits:
            if not waiting.done():
                waiting.set_exception(_lost())

    def _take_state(self, state: FleetState) -> None:
        try:
            if state.number < self._number:
                # The coordinator has started after the call that this head saw last.
                self._say(snapshot_of(self._orchestrator, self._number))
            else:
                telling = adopt(self._orchestrator, state)
                self._number = state.number
                for each in telling:
                    self._spawn(each)
        except WireError as error:
            logger.error("What the fleet was told cannot be told here: %s", error)
        finally:
            self._synced.set()

    async def _tell_front(self, begun: OngoingCall) -> None:
        await tell(self._orchestrator.output_async_queue.give, begun.engine_state_update())

    def _say(self, message: CallMessageFromHead) -> bool:
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
        "The coordinator of the fleet was lost during the call, and other servers may not know of it. Please repeat it."
    )
