"""How much an engine is sent before it can begin it: enough that it never idles, and no more than that."""

from math import ceil, inf, sqrt
from typing import NamedTuple

from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.vllm_api.requests.engine_types import BatchLimits

_STEPS = 2
"""Steps' worth of prompts that an engine gets ahead: the next one while the output of the last is on its way, and one
more for heads that hear late. One head that hears at once needs no more than one: p99 TTFT under `bursty` is 797 ms
with one and 794 ms with two."""
_YIELDING_STEPS = 1 / 4
"""The same of requests that leave room for others: that is what these may have to wait for in the engine."""
_SPARE_SHARE = 1 / 16
"""Requests ahead of the sequence slots, as a share of these: as many end in a step or two of a full engine."""


class SendWindow(NamedTuple):
    """The rule by which a request may leave the head.

    Attributes:
        limits: what the engines put into a step.
        limited: whether requests wait at the head at all; false: each is sent at once.
        recalls: whether one that waits for a replica may go to another that has room earlier, if the policy says so.
    """

    limits: BatchLimits = BatchLimits()
    limited: bool = False
    recalls: bool = False

    @property
    def short_prefill_tokens(self) -> float:
        """Prompt tokens that are soon computed, so that waiting for them is no matter."""
        return _YIELDING_STEPS * self.limits.tokens

    def has_free_slot(self, ledger: LoadLedger) -> bool:
        """Whether a request would not wait at the engine for a sequence slot, as far as is known."""
        busy = ledger.running + ledger.pending if ledger.receives_reports else ledger.others
        return busy < (self.limits.sequences or inf)

    def has_room(
        self, ledger: LoadLedger, prefill_tokens: int, leaves_headroom: bool = False, behind_in_share: bool = False
    ) -> bool:
        """Whether an engine can begin a request in its next steps.

        One that computes a prompt has always another one behind it, or it would idle until the head hears of the end of
        the first. Beyond that it gets what fits into `_STEPS` steps, of which this head has the share that it has of
        all that waits; and only while it has, as far as it said, a sequence slot and KV memory.

        Args:
            ledger: the replica's.
            prefill_tokens: tokens of the prompt that are to be computed.
            leaves_headroom: whether it leaves room at the engine for requests of others that are to go before it.
            behind_in_share: whether one that leaves room would come behind the prompt of one that need not, whose step
                it would lengthen.
        """
        if not self.limited:
            return True
        if leaves_headroom and not self._has_spare_room(ledger, prefill_tokens, behind_in_share):
            return False
        unbegun, share = ledger.pending, ledger.prefill_share
        if unbegun < (2 if share == 1.0 else 1):
            return True
        # Whatever this one's length: what is there then lasts for a step at least.
        if ledger.pending_tokens_behind_first >= _STEPS * self.limits.tokens * share:
            return False
        slots = self.limits.sequences
        if ledger.running + unbegun >= slots + max(2.0, slots * _SPARE_SHARE):
            return False
        free = ledger.free_tokens
        return free is None or ledger.pending_tokens + prefill_tokens <= free

    def _has_spare_room(self, ledger: LoadLedger, prefill_tokens: int, behind_in_share: bool) -> bool:
        """Whether enough is left behind it that a request of another tenant can be begun at once.

        In telephony this is trunk reservation (Kelly, "Loss networks", 1991): a few free places, for those alone whose
        share it is, and these hardly ever wait. How many it takes grows as the square root of all.
        """
        busy, slots = ledger.running + ledger.pending, self.limits.sequences
        if not ledger.receives_reports or not slots:
            return True
        spare = ceil(sqrt(slots) / 2)
        if busy + spare >= slots:
            return False
        # While others get their next tokens, an engine without a prompt is not idle.
        if ledger.pending >= (1 if ledger.decoding else 2):
            behind = ledger.pending_tokens + prefill_tokens
            if behind_in_share or behind > self.short_prefill_tokens * ledger.prefill_share:
                return False
        free = ledger.free_tokens
        return free is None or ledger.pending_tokens + prefill_tokens + ledger.cache_tokens * spare / slots <= free


SEND_AT_ONCE = SendWindow()
"""Nothing waits at the head."""
