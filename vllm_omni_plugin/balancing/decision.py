"""Why a request goes where it goes."""

from msgspec import Struct


# Structs, since a named tuple takes four times as long to make, and a decision has up to eight candidates.
class Candidate(Struct, frozen=True, order=True, gc=False):
    """A replica that a policy looked at.

    Attributes:
        position: its place in the replicas the policy was given.
        score: what the policy compared; the lowest wins.
        matched_tokens: prompt tokens that it is expected to have cached.
    """

    position: int
    score: float
    matched_tokens: int = 0


class Decision(Struct, frozen=True, gc=False):
    """A policy's choice.

    Attributes:
        position: the place of the chosen replica in those the policy was given.
        reason: what decided, one of a few words that can label a metric, such as `least-load` or `session`.
        candidates: those compared, the chosen one among them; empty where nothing was compared.
        fallback: why the policy decided by something less than its rule, in as few words; "" if it did not.
        matched_tokens: prompt tokens that the chosen replica is expected to have cached.
    """

    position: int
    reason: str
    candidates: tuple[Candidate, ...] = ()
    fallback: str = ""
    matched_tokens: int = 0
