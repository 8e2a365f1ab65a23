"""How much an engine is sent before it can begin it: enough that it never idles, and no more than that."""

from typing import NamedTuple

from vllm_omni_plugin.orchestrator.requests.charges import Account
from vllm_omni_plugin.vllm_api.requests.facts import BatchLimits

_STEPS = 2
"""Steps' worth of prompts that an engine gets ahead: the next one while the output of the last is on its way, and one
more for heads that hear late. One head that hears at once needs no more than one: p99 TTFT under `bursty` is 797 ms
with one and 794 ms with two."""
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

    def has_room(self, account: Account, prefill_tokens: int) -> bool:
        """Whether an engine can begin a request in its next steps.

        One that computes a prompt has always another one behind it, or it would idle until the head hears of the end of
        the first. Beyond that it gets what fits into `_STEPS` steps, of which this head has the share that it has of
        all that waits; and only while it has, as far as it said, a sequence slot and KV memory.

        Args:
            account: the replica's.
            prefill_tokens: tokens of the prompt that are to be computed.
        """
        if not self.waits:
            return True
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


AT_ONCE = Reserve()
"""Nothing waits at the head."""
