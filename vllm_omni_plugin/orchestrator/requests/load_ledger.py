"""The load of one replica: charged before a request is sent, released after it, joined with what others report."""

from math import ceil, exp
from typing import NamedTuple

from vllm_omni_plugin.balancing import ReplicaAdapters, ReplicaLoad
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize, LoadReport

_RATE_MEMORY_S = 30.0
"""Seconds of prefill after which an observation weighs 1/e in the prefill rate."""
_UNKNOWN_SEQUENCES = 32
"""Requests that an engine starts at once which does not report its own number, as Python stages do not."""

UNKNOWN_SIZE = EngineSize()
_NO_REPORT = LoadReport(0, 0, 0.0)


class Work(NamedTuple):
    """Unfinished requests of one or several heads, their prompt tokens still to be computed, and their adapters."""

    requests: int = 0
    prefill_tokens: int = 0
    adapters: tuple[str, ...] = ()


NO_WORK = Work()


class LoadLedger:
    """Sums over the requests on one replica, and what its engine and other heads report.

    An attempt is charged, sent to the engine, gets its first output and is released, in this order. It is *unsent*
    until it is sent, or if that failed, *pending* until its first output, and *decoding* from then on.

    Fields that `ReplicaLoad` has, too, are explained there. `pending_tokens` are still to be computed. `prompted` and
    `generated` are all tokens of prompts and outputs so far, for this head, also from the cache.
    """

    def __init__(self, size: EngineSize = UNKNOWN_SIZE) -> None:
        self.size = size
        self.adapters = ReplicaAdapters(size.adapters)
        self.requests = 0
        self.others = 0
        self.prefill_tokens = 0
        self.unsent = 0
        self.pending_tokens = 0
        self.prompted = 0
        self.generated = 0
        # In the order in which they were sent.
        self._pending: dict[StageRun, None] = {}
        self.decode_tokens = 0
        self._others_work: Work | None = None
        self._others_prefill_tokens = 0
        self._report = _NO_REPORT
        self._reported_others = 0
        # For the prefill rate: over the time in which there were prompts to compute, recent time weighing more.
        self._computed_tokens = 0.0
        self._computing_s = 0.0
        self._counted_until = 0.0
        # The answer of `load`; None after a change.
        self._load: ReplicaLoad | None = None

    @property
    def own(self) -> Work:
        """This head's own part of the replica's work, with the adapters that its requests use."""
        others, in_use = self.others_work.adapters, self.adapters.in_use
        adapters = tuple([name for name, requests in in_use.items() if requests > (name in others)])
        return Work(self.requests - self.others, self.prefill_tokens - self._others_prefill_tokens, adapters)

    @property
    def others_work(self) -> Work:
        """What other heads have charged, as they report it."""
        return self._others_work or NO_WORK

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def newest_pending(self) -> StageRun | None:
        return next(reversed(self._pending), None)

    @property
    def receives_reports(self) -> bool:
        """Whether the engine's load reports reach this head: they come with outputs of this head's requests."""
        return bool(self._pending or self.decoding)

    @property
    def decoding(self) -> int:
        return self.requests - self.others - self.unsent - len(self._pending)

    @property
    def pending_tokens_behind_first(self) -> int:
        """`pending_tokens` without those of the first prompt, which the engine computes now."""
        first = next(iter(self._pending), None)
        return 0 if first is None else self.pending_tokens - first.prefill_tokens

    @property
    def prefill_share(self) -> float:
        """This head's part of the prompt tokens that all heads have charged and the engine has to compute, 0 to 1."""
        others = self._others_prefill_tokens
        return 1.0 if not others else 1.0 - others / self.prefill_tokens

    @property
    def running(self) -> int:
        """Requests of all heads that the engine has started, as it reported."""
        return self._report.running

    @property
    def kv_usage(self) -> float:
        return self._report.kv_usage

    @property
    def free_tokens(self) -> float | None:
        """Tokens for which the engine has free KV blocks, as it reported; None: not known."""
        return (1.0 - self._report.kv_usage) * self.cache_tokens if self.size.blocks else None

    @property
    def cache_tokens(self) -> int:
        """Tokens for which the engine has KV blocks; 0: not known."""
        return self.size.blocks * self.size.block_size

    @property
    def can_start(self) -> bool:
        """Whether the engine would start one more request at once, by what is charged to it and what it holds."""
        if self.requests >= (self.size.sequences or _UNKNOWN_SEQUENCES):
            return False
        return not self.size.blocks or self.prefill_tokens + self.decode_tokens < self.cache_tokens

    @property
    def waiting(self) -> int:
        """Requests of this head that the engine has not started, as far as it has reported. Any thread may read it.

        Requests that no report has counted yet wait, too. Of the requests of all heads that wait there, this head
        counts its share of all requests, rounded up, and at most those of its own without an output.
        """
        requests, others = self.requests, self.others
        excess = max(0, requests - self._report.running)
        if not excess:
            return 0
        return min(self.unsent + len(self._pending), ceil(excess * max(0, requests - others) / requests))

    @property
    def load(self) -> ReplicaLoad:
        """The load now; the same object until something changes. For the orchestrator's thread only."""
        load = self._load
        if load is None:
            load = self._load = self.uncached_load()
        return load

    def uncached_load(self) -> ReplicaLoad:
        """The load now, for any thread: not cached, since it may change while it is made."""
        return ReplicaLoad(
            self.requests,
            self.others,
            self.prefill_tokens,
            self.decode_tokens,
            self._report.waiting,
            self._report.running,
            self._report.kv_usage,
            self._computed_tokens / self._computing_s if self._computing_s else 0.0,
            self.size.blocks,
            self.size.block_size,
            self._others_work is not None,
            self.adapters,
        )

    def set_others_work(self, work: Work | None) -> None:
        """Other heads have charged this work; None: they do not report it, and the engine's reports count."""
        self._load = None
        before, self._others_work = self.others_work.adapters, work
        if before != self.others_work.adapters:
            self.adapters = self.adapters.with_others(before, self.others_work.adapters)
        self._count_others()

    def charge(self, run: StageRun, now: float) -> None:
        self._load = None
        self.requests += 1
        self.unsent += 1
        if run.adapter:
            self.adapters = self.adapters.charge(run.adapter)
        if run.prefill_tokens:
            if self.prefill_tokens > self._others_prefill_tokens:
                self._count_prefill_time(now)
            self._counted_until = now
            self.prefill_tokens += run.prefill_tokens

    def mark_sent(self, run: StageRun) -> None:
        run.sent = True
        run.attempts += 1
        self.unsent -= 1
        self._pending[run] = None
        self.pending_tokens += run.prefill_tokens

    def add_first_output(self, run: StageRun, now: float) -> None:
        """The attempt's first output came: its prompt is computed, and it holds KV blocks until its end."""
        self._load = None
        if not run.sent:
            self.mark_sent(run)
        self._remove_pending(run)
        run.has_output = True
        self._end_prefill(run, now, computed=run.prefill_tokens)
        self.decode_tokens += run.prompt_tokens + run.output_tokens
        self.prompted += run.prompt_tokens + run.output_tokens

    def add_tokens(self, tokens: int, decoding: bool) -> None:
        """Runs have got tokens; `decoding`: after their first output. They count them in their `output_tokens`."""
        self.generated += tokens
        if decoding:
            self.decode_tokens += tokens
            self._load = None

    def release(self, run: StageRun, now: float) -> None:
        """Undo `charge`: the attempt is over, or the run is to be assigned anew."""
        self._load = None
        self.requests -= 1
        if run.adapter:
            self.adapters = self.adapters.release(run.adapter)
        if run.has_output:
            self.decode_tokens -= run.prompt_tokens + run.output_tokens
        else:
            if run.sent:
                self._remove_pending(run)
            else:
                self.unsent -= 1
            self._end_prefill(run, now, computed=0)
        if self.requests == self.others:
            # An engine sends each report to one of its clients, preferably one that gets outputs. A head without
            # requests there may never get another report, and the last one would keep it away for ever.
            self._reported_others, self._report = 0, _NO_REPORT
            self._count_others()

    def report(self, report: LoadReport) -> None:
        """Apply a report of the engine, unless it has no requests; attempts that it finished before have been released.

        Requests charged later are not in it. A report never hides this head's own requests.
        """
        own = self.requests - self.others
        if own:
            self._load = None
            self._report = report
            others = max(0, report.waiting + report.running - (own - self.unsent))
            if others != self._reported_others:
                self._reported_others = others
                self._count_others()

    def _count_others(self) -> None:
        """Other heads' work as they report it, or without a session as engines' reports show it."""
        requests, prefill_tokens = self._reported_others, 0
        if self._others_work is not None:
            requests, prefill_tokens = self._others_work[:2]
        self.requests += requests - self.others
        self.prefill_tokens += prefill_tokens - self._others_prefill_tokens
        self.others, self._others_prefill_tokens = requests, prefill_tokens

    def _remove_pending(self, run: StageRun) -> None:
        del self._pending[run]
        self.pending_tokens -= run.prefill_tokens

    def _end_prefill(self, run: StageRun, now: float, computed: int) -> None:
        if run.prefill_tokens:
            self._count_prefill_time(now, computed)
            self.prefill_tokens -= run.prefill_tokens

    def _count_prefill_time(self, now: float, computed: int = 0) -> None:
        elapsed = max(0.0, now - self._counted_until)
        self._counted_until = now
        weight = exp(-elapsed / _RATE_MEMORY_S)
        self._computed_tokens = self._computed_tokens * weight + computed
        self._computing_s = self._computing_s * weight + elapsed
