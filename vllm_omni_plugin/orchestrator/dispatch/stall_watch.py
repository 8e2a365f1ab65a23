"""Finds replicas whose engines answer, but compute none of their requests."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.load_ledger import Work
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

if TYPE_CHECKING:
    # It imports vLLM.
    from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

_LATE_S = 1.0
"""A check that is later than this says that the head was late: outputs may have come that it has not read."""


class StallWatch:
    """Watches the replicas of one stage that have requests of this head. Lives on the orchestrator's loop.

    A replica has stalled if it owes this head an output, and has given no sign for too long (`timeout` seconds at
    least; 0: never) that it computes anything, see `Progress`. Whether it computes for other heads is known only from
    their reports. `is_halted`: an operator call keeps the engines from computing. `wake_at` asks for a call of
    `take_stalled`, by `Orchestrator.tick`, which takes the replicas out.
    """

    def __init__(
        self,
        api: "EngineApi",
        timeout: float,
        is_halted: Callable[[], bool],
        wake_at: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self.timeout = timeout if api.schedules else 0.0
        self._is_halted = is_halted
        self._wake_at = wake_at
        self._clock = clock
        # When a replica with requests is to be checked.
        self._due: dict[PoolMember, float] = {}

    def asked(self, member: PoolMember, run: StageRun) -> None:
        """A replica owes an output of a run from now on."""
        run.asked_at = self._clock()
        if self.timeout and member not in self._due:
            due = self._due[member] = run.asked_at + member.progress.limit(self.timeout)
            self._wake_at(due)

    def others_work_changed(self, member: PoolMember, before: Work, now: Work) -> None:
        """Other heads have reported their work at a replica. Fewer requests may have been aborted; a prompt that is
        computed while its request goes on is a sign."""
        if now.prefill_tokens < before.prefill_tokens and now.requests >= before.requests:
            member.progress.since = self._clock()

    def take_stalled(self) -> list[tuple[PoolMember, str]]:
        """The replicas that have stalled, and why. They are watched again as soon as they get a request."""
        now = self._clock()
        stalled = []
        for member in [member for member, due in self._due.items() if due <= now]:
            due = self._next_check(member, now, self._due.pop(member))
            if due is None:
                continue
            if due > now:
                self._due[member] = due
            else:
                waited = now - member.progress.since
                reason = f"its engine answers, but no request there got a token for {waited:.0f} s"
                stalled.append((member, f"{reason} (--omni-stall-timeout)"))
        if self._due:
            self._wake_at(min(self._due.values()))
        return stalled

    def request_to_try(self, member: PoolMember) -> Any | None:
        """A request of a stalled replica with which it can be tried again, see `EngineClient.try_request`.

        One that got tokens there, if there is one: it has not made the engine stall by its kind.
        """
        # A bound request may need what its engine has lost, and a transferred cache can be fetched once only.
        runs = [
            run
            for run in member.in_flight.values()
            if run.sent
            and run.streaming is None
            and run.affinity_key is None
            and not self._api.transfers_cache(run.request)
        ]
        return next((run.request for run in sorted(runs, key=lambda run: not run.has_output)), None)

    def _next_check(self, member: PoolMember, now: float, due: float) -> float | None:
        """When a replica will have stalled, unless it gives a sign before; None: it has no request."""
        if member.client is None or not member.in_flight:
            return None
        progress = member.progress
        if now - due > _LATE_S or self._is_halted():
            progress.since = now
        asked_at = [run.asked_at for run in member.in_flight.values() if self._owes(run)]
        progress.since = max(progress.since, min(asked_at, default=now))
        return progress.since + progress.limit(self.timeout)

    def _owes(self, run: StageRun) -> bool:
        """Whether a replica owes an output of a run. It does not while it waits for a session's input, or for the cache
        that another engine transfers."""
        if not run.sent or (run.streaming is not None and not run.streaming.open_turns):
            return False
        return run.has_output or not self._api.awaits_cache(run.request)
