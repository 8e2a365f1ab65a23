"""How much an engine is sent before it can begin it: enough that it never idles, and no more than that."""

from math import ceil, inf, sqrt
from typing import NamedTuple

from vllm_omni_plugin.orchestrator.requests.charges import Account
from vllm_omni_plugin.vllm_api.requests.engine_types import BatchLimits

_STEPS = 2
"""Steps' worth of prompts that an engine gets ahead: the next one while the output of the last is on its way, and one
more for heads that hear late. One head that hears at once needs no more than one: p99 TTFT under `bursty` is 797 ms
with one and 794 ms with two."""
_YIELDING_STEPS = 1 / 4
"""The same of requests that leave room for others: that is what these may have to wait for in the engine."""
_SPARE_SHARE = 1 / 16
"""Requests ahead of the sequence slots, as a share of these: as many end in a step or two of a full engine."""


class Reserve(NamedTuple):
    """The rule by which a request may leave the head.

    Attributes:
        limits: what the engines put into a step.
        waits: whether requests wait at the head at all; false: each is sent at once.
        recalls: whether one that waits for a replica may go to another that has room earlier, if the policy says so.
    """

    limits: BatchLimits = BatchLimits()
    waits: bool = False
    recalls: bool = False

    @property
    def few_tokens(self) -> float:
        """Prompt tokens that are soon computed, so that waiting for them is no matter."""
        return _YIELDING_STEPS * self.limits.tokens

    def has_slot(self, account: Account) -> bool:
        """Whether a request would not wait at the engine for a sequence slot, as far as is known."""
        busy = account.running + account.unbegun if account.is_heard else account.others
        return busy < (self.limits.sequences or inf)

    def has_room(
        self, account: Account, prefill_tokens: int, yields: bool = False, behind_others: bool = False
    ) -> bool:
        """Whether an engine can begin a request in its next steps.

        One that computes a prompt has always another one behind it, or it would idle until the head hears of the end of
        the first. Beyond that it gets what fits into `_STEPS` steps, of which this head has the share that it has of
        all that waits; and only while it has, as far as it said, a sequence slot and KV memory.

        Args:
            account: the replica's.
            prefill_tokens: tokens of the prompt that are to be computed.
            yields: whether it leaves room at the engine for requests of others that are to go before it.
            behind_others: whether one that leaves room would come behind the prompt of one that need not, whose step it
                would lengthen.
        """
        if not self.waits:
            return True
        if yields and not self._has_spare_room(account, prefill_tokens, behind_others):
            return False
        unbegun, share = account.unbegun, account.share
        if unbegun < (2 if share == 1.0 else 1):
            return True
        # Whatever this one's length: what is there then lasts for a step at least.
        if account.tokens_behind >= _STEPS * self.limits.tokens * share:
            return False
        slots = self.limits.sequences
        if account.running + unbegun >= slots + max(2.0, slots * _SPARE_SHARE):
            return False
        free = account.free_tokens
        return free is None or account.unbegun_tokens + prefill_tokens <= free

    def _has_spare_room(self, account: Account, prefill_tokens: int, behind_others: bool) -> bool:
        """Whether enough is left behind it that a request of another tenant can be begun at once.

        In telephony this is trunk reservation (Kelly, "Loss networks", 1991): a few free places, for those alone whose
        share it is, and these hardly ever wait. How many it takes grows as the square root of all.
        """
        busy, slots = account.running + account.unbegun, self.limits.sequences
        if not account.is_heard or not slots:
            return True
        spare = ceil(sqrt(slots) / 2)
        if busy + spare >= slots:
            return False
        # While others get their next tokens, an engine without a prompt is not idle.
        if account.unbegun >= (1 if account.began else 2):
            behind = account.unbegun_tokens + prefill_tokens
            if behind_others or behind > self.few_tokens * account.share:
                return False
        free = account.free_tokens
        return free is None or account.unbegun_tokens + prefill_tokens + account.cache_tokens * spare / slots <= free


AT_ONCE = Reserve()
"""Nothing waits at the head."""
