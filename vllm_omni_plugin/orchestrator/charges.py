"""What requests weigh on the replica they are sent to: charged before the send, released once."""

from math import exp
from typing import NamedTuple

from vllm_omni_plugin.balancing import Decision, ReplicaLoad, Task
from vllm_omni_plugin.vllm_api.facts import CacheSize, LoadReport

_RATE_MEMORY_S = 30.0
"""Seconds of computing prompts after which what was seen weighs 1/e in the rate."""


UNKNOWN_CACHE = CacheSize()


class Work(NamedTuple):
    """What one head, or several, have charged to a replica.

    Attributes:
        requests: unfinished ones.
        prefill_tokens: prompt tokens of theirs that count as still to be computed.
    """

    requests: int = 0
    prefill_tokens: int = 0


NO_WORK = Work()


class Charge:
    """One attempt of a request on one replica.

    Attributes:
        task: what the policy was asked.
        decision: what it answered.
        dispatched_at: monotonic seconds.
        prompt_tokens: tokens of the prompt that was sent.
        prefill_tokens: those of them that count as still to be computed until the first output.
        began: whether the first output has come.
        output_tokens: tokens that the engine has produced.
        answer_begins: how many of the tokens produced for the request before are in the prompt that was sent.
    """

    __slots__ = (
        "answer_begins",
        "began",
        "decision",
        "dispatched_at",
        "output_tokens",
        "prefill_tokens",
        "prompt_tokens",
        "task",
    )

    def __init__(self, task: Task, decision: Decision, now: float, answer_begins: int = 0) -> None:
        prompt = task.get("prompt")
        self.task = task
        self.decision = decision
        self.dispatched_at = now
        self.prompt_tokens = len(prompt.token_ids) if prompt is not None else 0
        self.prefill_tokens = max(0, self.prompt_tokens - decision.matched_tokens)
        self.began = False
        self.output_tokens = 0
        self.answer_begins = answer_begins


class Account:
    """Sums over the charges of one replica, what its engine and other heads report, joined to a `ReplicaLoad`.

    Args:
        cache: its engine's.
    """

    def __init__(self, cache: CacheSize = UNKNOWN_CACHE) -> None:
        self._cache = cache
        self._requests = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._others = 0
        self._peers: Work | None = None
        self._report = LoadReport(0, 0, 0.0)
        self._rate = _PrefillRate()

    @property
    def own(self) -> Work:
        """What this head has charged."""
        return Work(self._requests, self._prefill_tokens)

    @property
    def load(self) -> ReplicaLoad:
        """All of it at this moment."""
        others, prefill_tokens, peers = self._others, self._prefill_tokens, self._peers
        if peers is not None:
            others = peers.requests
            prefill_tokens += peers.prefill_tokens
        return ReplicaLoad(
            self._requests + others,
            others,
            prefill_tokens,
            self._decode_tokens,
            *self._report,
            self._rate.value,
            *self._cache,
            peers is not None,
        )

    def heed(self, peers: Work | None) -> None:
        """The other heads have charged so much; None: they do not say, and the engine's word counts."""
        self._peers = peers

    def charge(self, charge: Charge) -> None:
        """An attempt is about to be sent."""
        self._requests += 1
        if charge.prefill_tokens:
            self._rate.pass_time(charge.dispatched_at, busy=self._prefill_tokens > 0)
            self._prefill_tokens += charge.prefill_tokens

    def begin(self, charge: Charge, now: float) -> None:
        """Its first output came: the prompt is computed, and what it holds of the KV memory stays to its end."""
        charge.began = True
        self._end_prefill(charge, now, computed=charge.prefill_tokens)
        self._decode_tokens += charge.prompt_tokens + charge.output_tokens

    def produce(self, charge: Charge, tokens: int) -> None:
        """The engine has produced so many tokens more."""
        charge.output_tokens += tokens
        if charge.began:
            self._decode_tokens += tokens

    def release(self, charge: Charge, now: float) -> None:
        """The attempt is over, for whatever reason. To be called once."""
        self._requests -= 1
        if charge.began:
            self._decode_tokens -= charge.prompt_tokens + charge.output_tokens
        else:
            self._end_prefill(charge, now, computed=0)
        if not self._requests:
            # An engine tells each report to one of its clients, those with outputs first. One that has no more requests
            # there may hear nothing again, and what it heard last would keep it away for ever.
            self._others = 0
            self._report = LoadReport(0, 0, 0.0)

    def report(self, report: LoadReport) -> None:
        """The engine reported, and what it finished by then has been released; void while nothing is in flight there.

        What was dispatched since the report was taken is charged and not in it, so it can hide others but not itself.
        """
        if self._requests:
            self._report = report
            self._others = max(0, report.waiting + report.running - self._requests)

    def _end_prefill(self, charge: Charge, now: float, computed: int) -> None:
        if charge.prefill_tokens:
            self._rate.pass_time(now, busy=True, computed=computed)
            self._prefill_tokens -= charge.prefill_tokens


class _PrefillRate:
    """Prompt tokens per second of the time in which there were some to compute, recent ones weighing more."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._seen_until = 0.0

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def pass_time(self, now: float, busy: bool, computed: int = 0) -> None:
        """Account for the time since the last call, in which the replica was or was not computing prompts."""
        elapsed = max(0.0, now - self._seen_until) if busy else 0.0
        self._seen_until = now
        weight = exp(-elapsed / _RATE_MEMORY_S)
        self._tokens = self._tokens * weight + computed
        self._seconds = self._seconds * weight + elapsed
