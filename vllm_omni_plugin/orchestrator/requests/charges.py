"""What one replica has to do: charged before a request is sent, released once, joined with what others report."""

from math import ceil, exp
from typing import NamedTuple

from vllm_omni_plugin.balancing import ReplicaLoad
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.vllm_api.requests.engine_types import CacheSize, LoadReport

_RATE_MEMORY_S = 30.0
"""Seconds of computing prompts after which what was seen weighs 1/e in the rate."""

UNKNOWN_CACHE = CacheSize()
_NO_REPORT = LoadReport(0, 0, 0.0)


class Work(NamedTuple):
    """What one head, or several, have charged to a replica.

    Attributes:
        requests: unfinished ones.
        prefill_tokens: prompt tokens of theirs that count as still to be computed.
    """

    requests: int = 0
    prefill_tokens: int = 0


NO_WORK = Work()


class Account:
    """Sums over the requests on one replica, joined with what its engine and other heads report.

    Args:
        cache: its engine's.

    Attributes:
        requests: see `ReplicaLoad`.
        others: likewise.
        prefill_tokens: likewise.
        unsent: requests that are charged and wait at this head.
        unbegun_tokens: prompt tokens to be computed of this head's requests that the engine has got.
        clear_since: monotonic seconds at which `ClearReplicas` began to keep prompts away; None if it does not.
    """

    def __init__(self, cache: CacheSize = UNKNOWN_CACHE) -> None:
        self.requests = 0
        self.others = 0
        self.prefill_tokens = 0
        self.unsent = 0
        self.unbegun_tokens = 0
        self.clear_since: float | None = None
        # In the order in which they were sent.
        self._unbegun: dict[StageRun, None] = {}
        self._sessions = 0
        self._cache = cache
        self._decode_tokens = 0
        self._peers: Work | None = None
        self._peers_prefill_tokens = 0
        self._report = _NO_REPORT
        self._reported_others = 0
        self._unanswered = 0
        # Of the time in which there were prompts to compute, recent time weighing more.
        self._computed_tokens = 0.0
        self._computing_s = 0.0
        self._seen_until = 0.0
        # As it was asked for last; None once something has changed since.
        self._load: ReplicaLoad | None = None

    @property
    def own(self) -> Work:
        """What this head has charged."""
        return Work(self.requests - self.others, self.prefill_tokens - self._peers_prefill_tokens)

    @property
    def unbegun(self) -> int:
        """Requests of this head that the engine has got and not answered yet."""
        return len(self._unbegun)

    @property
    def newest(self) -> StageRun | None:
        """The last of them that was sent, None without any."""
        return next(reversed(self._unbegun), None)

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that the engine computes before those that it gets now, as far as is known: this head's, and
        all that other heads have charged."""
        return self.unbegun_tokens + self._peers_prefill_tokens

    @property
    def is_heard(self) -> bool:
        """Whether its engine's reports come: with outputs, so one of this head's requests must be there."""
        return bool(self._unbegun or self.began)

    @property
    def began(self) -> int:
        """Requests of this head that the engine has answered, and not to the end."""
        return self.requests - self.others - self.unsent - len(self._unbegun)

    @property
    def answering(self) -> int:
        """Those of them of which each step brings something: a session with streaming input may be between two turns,
        and none counts."""
        return self.began - self._sessions

    @property
    def tokens_behind(self) -> int:
        """`unbegun_tokens` without those of the prompt that the engine computes now, if it computes any."""
        first = next(iter(self._unbegun), None)
        return 0 if first is None else self.unbegun_tokens - first.prefill_tokens

    @property
    def share(self) -> float:
        """This head's part of the prompts that all heads have charged and the engine has to compute, 0 to 1."""
        peers = self._peers_prefill_tokens
        return 1.0 if not peers else 1.0 - peers / self.prefill_tokens

    @property
    def running(self) -> int:
        """Requests that the engine said it had begun, of all heads."""
        return self._report.running

    @property
    def free_tokens(self) -> float | None:
        """Tokens for which the engine said it had KV memory; None if that is not known."""
        return (1.0 - self._report.kv_usage) * self.cache_tokens if self._cache.blocks else None

    @property
    def cache_tokens(self) -> int:
        """Tokens for which the engine has KV memory; 0 if that is not known."""
        return self._cache.blocks * self._cache.block_size

    @property
    def waiting(self) -> int:
        """Requests of this head that the engine has not begun, as far as it has reported. Any thread may read it.

        What no report has counted yet waits, too. Of what all heads have waiting there, this one takes the share for
        its own that it has of their requests, rounded up, and never more than it has without an output.
        """
        requests, others = self.requests, self.others
        excess = max(0, requests - self._report.running)
        return min(self._unanswered, ceil(excess * max(0, requests - others) / requests)) if excess else 0

    @property
    def load(self) -> ReplicaLoad:
        """All of it at this moment; the same object until something changes. For the thread that changes it."""
        load = self._load
        if load is None:
            load = self._load = self.uncached_load()
        return load

    def uncached_load(self) -> ReplicaLoad:
        """The same for any thread: made anew, and not kept, since it may have changed before it could be."""
        return ReplicaLoad(
            self.requests,
            self.others,
            self.prefill_tokens,
            self._decode_tokens,
            *self._report,
            self._computed_tokens / self._computing_s if self._computing_s else 0.0,
            *self._cache,
            self._peers is not None,
        )

    def join(self, peers: Work | None) -> None:
        """The other heads have charged so much; None: they do not say, and the engine's word counts."""
        self._load = None
        self._peers = peers
        self._count_others()

    def charge(self, run: StageRun, now: float) -> None:
        """An attempt is the replica's from here on, and waits at this head until `send`."""
        self._load = None
        self.requests += 1
        self._unanswered += 1
        self.unsent += 1
        if run.prefill_tokens:
            if self.prefill_tokens > self._peers_prefill_tokens:
                self._pass_time(now)
            self._seen_until = now
            self.prefill_tokens += run.prefill_tokens

    def send(self, run: StageRun) -> None:
        """The engine gets it."""
        run.sent = True
        run.attempts += 1
        self.unsent -= 1
        self.clear_since = None
        self._unbegun[run] = None
        self.unbegun_tokens += run.prefill_tokens

    def begin(self, run: StageRun, now: float) -> None:
        """Its first output came: the prompt is computed, and what it holds of the KV memory stays to its end."""
        self._load = None
        if not run.sent:
            self.send(run)
        self._leave_unbegun(run)
        run.began = True
        self._sessions += run.streaming is not None
        self._unanswered -= 1
        self._end_prefill(run, now, computed=run.prefill_tokens)
        self._decode_tokens += run.prompt_tokens + run.output_tokens

    def produce(self, run: StageRun, tokens: int) -> None:
        """The engine has produced so many tokens more."""
        run.output_tokens += tokens
        if run.began:
            self._decode_tokens += tokens
            self._load = None

    def release(self, run: StageRun, now: float) -> None:
        """The attempt is over, for whatever reason. To be called once."""
        self._load = None
        self.requests -= 1
        if run.began:
            self._decode_tokens -= run.prompt_tokens + run.output_tokens
            self._sessions -= run.streaming is not None
        else:
            self._unanswered -= 1
            if run.sent:
                self._leave_unbegun(run)
            else:
                self.unsent -= 1
            self._end_prefill(run, now, computed=0)
        if self.requests == self.others:
            # An engine tells each report to one of its clients, those with outputs first. One that has no more requests
            # there may hear nothing again, and what it heard last would keep it away for ever.
            self._reported_others, self._report = 0, _NO_REPORT
            self._count_others()

    def report(self, report: LoadReport) -> bool:
        """The engine reported, and what it finished by then has been released; void while nothing is in flight there.

        What was dispatched since the report was taken is charged and not in it, so it can hide others but not itself.

        Returns:
            Whether `requests` has changed.
        """
        own, before = self.requests - self.others, self.requests
        if own:
            self._load = None
            self._report = report
            self._reported_others = max(0, report.waiting + report.running - (own - self.unsent))
            self._count_others()
        return self.requests != before

    def _count_others(self) -> None:
        requests, prefill_tokens = (self._reported_others, 0) if self._peers is None else self._peers
        self.requests += requests - self.others
        self.prefill_tokens += prefill_tokens - self._peers_prefill_tokens
        self.others, self._peers_prefill_tokens = requests, prefill_tokens

    def _leave_unbegun(self, run: StageRun) -> None:
        del self._unbegun[run]
        self.unbegun_tokens -= run.prefill_tokens

    def _end_prefill(self, run: StageRun, now: float, computed: int) -> None:
        if run.prefill_tokens:
            self._pass_time(now, computed)
            self.prefill_tokens -= run.prefill_tokens

    def _pass_time(self, now: float, computed: int = 0) -> None:
        """Account for the time since then, in which the replica was computing prompts."""
        elapsed = max(0.0, now - self._seen_until)
        self._seen_until = now
        weight = exp(-elapsed / _RATE_MEMORY_S)
        self._computed_tokens = self._computed_tokens * weight + computed
        self._computing_s = self._computing_s * weight + elapsed
