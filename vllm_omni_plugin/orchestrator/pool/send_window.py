"""How much the head sends to an engine ahead of time: enough that the engine never idles, and no more."""

from math import ceil, sqrt

from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger

_STEPS = 2
"""Engine steps' worth of prompt tokens that are sent ahead: one for the time until the head gets the output of the step
before, and one more for heads that get it late."""
_OVER_SHARE_STEPS = 1 / 4
"""The same for over-share requests: other requests may have to wait for these tokens in the engine. A single prompt is
sent whatever its length."""
_SPARE_SLOTS = 1 / 2
"""Sequence slots that over-share requests leave free, as a multiple of the root of all slots."""
_EXTRA_SLOTS = 1 / 16
"""Requests that are sent beyond the engine's sequence slots, as a share of these: about as many end in two steps."""


def has_room(ledger: LoadLedger, prefill_tokens: int, over_share: bool = False, behind_in_share: bool = False) -> bool:
    """Whether an engine can begin a request with this many tokens to be computed in its next steps.

    What it can is said by its own `EngineSize`, not by the head's flags. Behind the prompt that it computes there is
    always another one, or it would idle until the head gets the output. More is sent as long as it fits into `_STEPS`
    steps, of which this head has its share of all heads' prompts, and as long as the engine has sequence slots and KV
    memory by its last report.

    A request `over_share` leaves headroom. Sent `behind_in_share`, it would also make the step of another tenant's
    prompt longer.
    """
    if over_share and not _keeps_headroom(ledger, prefill_tokens, behind_in_share):
        return False
    pending, share = ledger.pending, ledger.prefill_share
    if pending < (2 if share == 1.0 else 1):
        return True
    # Whatever the length of this prompt: the pending prompts last for a step at least.
    if ledger.pending_tokens_behind_first >= _STEPS * ledger.size.step_tokens * share:
        return False
    slots = ledger.size.sequences
    if ledger.running + pending >= slots + max(2.0, slots * _EXTRA_SLOTS):
        return False
    return _fits_cache(ledger, prefill_tokens)


def short_prefill_tokens(ledger: LoadLedger) -> float:
    """Prompt tokens whose prefill at a replica is so short that waiting for it does not matter."""
    return _OVER_SHARE_STEPS * ledger.size.step_tokens


def _keeps_headroom(ledger: LoadLedger, prefill_tokens: int, behind_in_share: bool) -> bool:
    """Whether a request within its share could still begin at once behind this request.

    Trunk reservation of telephony (Kelly, "Loss networks", 1991): a few places are free for some callers only, who
    hardly ever wait then. Their number grows as the square root of all.
    """
    busy, slots = ledger.running + ledger.pending, ledger.size.sequences
    if not ledger.receives_reports or not slots:
        return True
    spare = ceil(sqrt(slots) * _SPARE_SLOTS)
    if busy + spare >= slots:
        return False
    # An engine that decodes does not idle without a pending prompt.
    if ledger.pending >= (1 if ledger.decoding else 2):
        behind = ledger.pending_tokens + prefill_tokens
        if behind_in_share or behind > _OVER_SHARE_STEPS * ledger.size.step_tokens * ledger.prefill_share:
            return False
    return _fits_cache(ledger, prefill_tokens, ledger.cache_tokens * spare / slots)


def _fits_cache(ledger: LoadLedger, prefill_tokens: int, spare_tokens: float = 0.0) -> bool:
    """Whether the KV cache has room for a prompt and what is pending; unknown sizes have."""
    free = ledger.free_tokens
    return free is None or ledger.pending_tokens + prefill_tokens + spare_tokens <= free
