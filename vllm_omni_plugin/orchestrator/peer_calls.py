"""The other heads of a fleet: what an administrator tells one of them holds for all, and for those that come later."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from vllm_omni_plugin.coordinator import PeerCall, ReplicaKey
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator import engine_calls
from vllm_omni_plugin.orchestrator.fleet_record import Head, RecordKeeper
from vllm_omni_plugin.orchestrator.foreign_calls import ForeignCalls
from vllm_omni_plugin.orchestrator.membership import manage_by_key
from vllm_omni_plugin.orchestrator.own_call import OwnCall
from vllm_omni_plugin.orchestrator.peer_asking import PeerAsking, PeerLink
from vllm_omni_plugin.orchestrator.peer_messages import (
    ENGINE_CALL,
    ENGINE_CALL_OVER,
    MANAGE,
    STATE,
    VERSION,
    Action,
    EngineCall,
    EngineCallOver,
    FleetRecord,
    Manage,
    RemoteKey,
    Stamp,
    Version,
    decoded,
    mark_of,
)
from vllm_omni_plugin.orchestrator.stage_calls import StageCall
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember

logger = init_logger(__name__)

FIRST_S = 5.0
"""Seconds that a head which has just come waits for the others at most."""
MAX_DEFERRED = 1024
"""Calls of others that wait while this head asks for what it has missed; more are refused, and told again later."""


class PeerCalls:
    """Tells the other heads what this one is told, and heeds what they are. Satisfies `PeerHeads`.

    Lives on the orchestrator's loop. Every change says what it follows, so that a head which missed one sees that with
    the next, and asks the others for everything. Of two records the newer counts: heads that were told different things
    while they could not reach each other, or at the same time, agree on one.

    Args:
        head: this head; its calls come by here from now on.
        head_id: its id.
        seat: the way to the others; None before there is one.
        delay: waits between attempts.
    """

    def __init__(
        self,
        head: Head,
        head_id: str,
        seat: Callable[[], PeerLink | None],
        delay: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._head = head
        self._record = RecordKeeper(head, head_id)
        self._asking = PeerAsking(seat, self._version, delay)
        self._foreign = ForeignCalls(head.fan_out.stages, head.tell_front)
        self._calls_made = 0
        self._under_way: set[int] = set()
        self._closed = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._synchronising = asyncio.Lock()
        self._deferred: list[PeerCall] = []
        self._adopted, self._synchronised = asyncio.Event(), asyncio.Event()
        self._handlers: dict[str, Callable[[PeerCall], None]] = {
            ENGINE_CALL: self._begin_foreign,
            ENGINE_CALL_OVER: self._end_foreign,
            MANAGE: self._manage,
            STATE: self._tell_all,
            VERSION: self._compare,
        }
        head.fan_out.peers = self

    async def close(self) -> None:
        """Stop telling and heeding."""
        self._closed = True
        self._foreign.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._asking.close()

    def synchronise(self) -> None:
        """This head has a new seat, or has missed something: ask the others for everything."""
        self._asking.cut_off = False
        self._adopted.clear()
        self._synchronised.clear()
        self._spawn(self._synchronise())

    def peers_lost(self, head_ids: Sequence[str] | None) -> None:
        """Heads are gone; None: all are out of reach, since the coordinator is silent."""
        self._record.told.clear()
        self._asking.cut_off = head_ids is None
        giving_up = self._foreign.abandon(head_ids)
        # Heads that are only out of reach will tell of the end of their calls themselves.
        self._spawn(self._contest_if(giving_up) if head_ids is not None else giving_up)

    def called(self, call: PeerCall) -> None:
        """Another head tells or asks something. Whatever it says, it gets an answer and nothing is raised."""
        if not self._synchronising.locked() or call.method == STATE:
            self._heed(call)
        elif len(self._deferred) < MAX_DEFERRED:
            self._deferred.append(call)
        else:
            self._asking.answer(call, error="this head asks for what it has missed; try again later")

    async def synchronised(self) -> None:
        """See `PeerHeads`."""
        await self._wait_for(self._synchronised)

    async def have_told(self, member: PoolMember, ask: bool) -> bool:
        """See `PeerHeads`."""
        await self._wait_for(self._adopted)
        mark, told = mark_of(member), self._record.told
        if ask and mark not in told:
            await self._synchronise()
            told = self._record.told
        if mark not in told:
            return False
        # What it is told from here on this head sees itself, until it loses it.
        told.discard(mark)
        return True

    def begin(self, stages: list[int], calls: Sequence[StageCall]) -> OwnCall | None:
        """See `PeerHeads`."""
        method, args = calls[0].method, calls[0].args
        lasting = self._head.fan_out.stages[0].shared.leaves_state(method, args)
        arguments = engine_calls.encode(method, args)
        if arguments is None:
            if lasting:
                logger.warning("Other heads cannot be told of this call of %s.", method)
            return None
        self._calls_made += 1
        self._under_way.add(self._calls_made)
        after = self._record.advance() if lasting else None
        told = [mark_of(member) for call in calls for member in call.members]
        message = EngineCall(self._calls_made, after, method, arguments, stages, told)
        return OwnCall(message, self._asking, self._record, self._spawn, self._own_call_ended)

    def managed(self, action: Action, key: ReplicaKey, reply: "Future[None]") -> None:
        """This head has done what an administrator wants with a replica; so shall the others, then it is answered."""
        message = Manage(self._record.advance(), action, RemoteKey(*key))
        telling = self._spawn(self._asking.tell(MANAGE, message))
        telling.add_done_callback(lambda _: reply.set_result(None))

    def _heed(self, call: PeerCall) -> None:
        handler = self._handlers.get(call.method)
        try:
            if handler is None:
                raise WireError(f"unknown call {call.method!r}")
            handler(call)
        except Exception as error:
            if not isinstance(error, WireError):
                logger.exception("Call %s of another head could not be dealt with.", call.method)
            self._asking.answer(call, error=str(error) or repr(error))

    def _begin_foreign(self, call: PeerCall) -> None:
        told = decoded(call.arguments, EngineCall)
        alone = self._foreign.begin(call.head_id, told)
        if told.after is not None:
            self._record.told &= set(told.told)
            self._hear(told.after, call.head_id)
        self._asking.answer(call, alone)

    def _end_foreign(self, call: PeerCall) -> None:
        over = decoded(call.arguments, EngineCallOver)
        told = self._foreign.told(call.head_id, over.call)
        ending = self._foreign.over(call.head_id, over)
        known = told is not None and (told.after is None or told.after.version >= self._record.adopted)
        if not known and not all(over.taken):
            # The record that this head adopted may hold this call, which nobody has taken.
            self.synchronise()
        elif over.after is not None:
            self._hear(over.after, call.head_id)
        self._spawn(self._answer_when_done(call, ending))

    def _manage(self, call: PeerCall) -> None:
        wish = decoded(call.arguments, Manage)
        self._hear(wish.after, call.head_id)
        head = self._head
        manage_by_key(wish.action, ReplicaKey(*wish.replica), head.stage_pools, head.remote_replicas, head.drained)
        self._asking.answer(call)
        self._decide_if_contested()

    def _tell_all(self, call: PeerCall) -> None:
        decoded(call.arguments, type(None))
        self._asking.answer(call, msgspec.to_builtins(self._record.take()))

    def _compare(self, call: PeerCall) -> None:
        version = decoded(call.arguments, Version)
        if version.stamp > self._record.stamp:
            self.synchronise()
        else:
            self._spawn(self._contest_if(self._foreign.compare(call.head_id, version.under_way)))
        self._asking.answer(call)

    def _hear(self, after: Stamp, head_id: str) -> None:
        if not self._record.hear(after, head_id):
            self.synchronise()

    async def _answer_when_done(self, call: PeerCall, ending: Awaitable[None] | None) -> None:
        if ending is not None:
            await ending
        self._asking.answer(call)
        self._decide_if_contested()

    async def _contest_if(self, given_up: Awaitable[bool]) -> None:
        if await given_up:
            # Not every head may have come to the same end of a call.
            self._record.contested = True
        self._decide_if_contested()

    def _own_call_ended(self, number: int) -> None:
        self._under_way.discard(number)
        self._decide_if_contested()

    def _version(self) -> Version:
        return Version(self._record.stamp, sorted(self._under_way))

    def _decide_if_contested(self) -> None:
        """Let this head's order of changes be everybody's, once all are over; of several such claims one prevails."""
        if self._record.contested and not self._under_way and not len(self._foreign):
            self._record.contested = False
            self._record.advance()
            self._spawn(self._asking.tell(VERSION, self._version()))

    async def _synchronise(self) -> None:
        try:
            async with self._synchronising:
                telling = await self._adopt_the_newest()
                self._adopted.set()
            deferred, self._deferred = self._deferred, []
            for call in deferred:
                self.called(call)
            await telling
        finally:
            self._adopted.set()
            self._synchronised.set()

    async def _adopt_the_newest(self) -> "asyncio.Future[Any]":
        """Returns what is done when replicas and AsyncLLM's side know it, which does not hold up what comes next."""
        records = []
        for answer in await self._asking.ask(STATE, None):
            with suppress(WireError):
                if not answer.error:
                    records.append(decoded(answer.result, FleetRecord))
        newest = max(records, key=lambda record: record.stamp, default=None)
        telling: asyncio.Future[Any] = asyncio.gather()
        if newest is not None and newest.stamp > self._record.stamp:
            try:
                telling = self._record.adopt(newest)
                self._foreign.forget()
            except WireError as error:
                logger.error("What head %s was told cannot be told here: %s", newest.stamp.head_id, error)
        stamp = self._record.stamp
        self._record.told.update(*(record.told for record in records if record.stamp == stamp))
        if any(record.stamp < stamp for record in records):
            self._spawn(self._asking.tell(VERSION, self._version()))
        return telling

    async def _wait_for(self, news: asyncio.Event) -> None:
        if not self._asking.alone:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    await news.wait()

    def _spawn(self, work: Coroutine[Any, Any, object]) -> "asyncio.Task[object]":
        task = asyncio.create_task(work, name="omni-peers")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if self._closed:
            task.cancel()
        return task

    def _ended(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("What another head was told could not be dealt with.", exc_info=error)
