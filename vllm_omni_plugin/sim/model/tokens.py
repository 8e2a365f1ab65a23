"""The tokens of simulated answers: a pure function of everything before them."""

from array import array
from collections.abc import Collection, Sequence
from hashlib import blake2b

_HASH_BYTES = 8


class PrefixHash:
    """The hash of a growing sequence of token ids: at any moment a pure function of the salt and all tokens so far.

    It does not matter in which portions the tokens came, nor which of them were the prompt. So an answer that is
    resumed or replayed on another engine goes on as it would have, and the hashes at block boundaries are chained.

    Args:
        salt: whatever else the answer depends on, such as the weights.
    """

    def __init__(self, salt: bytes) -> None:
        self._state = blake2b(digest_size=_HASH_BYTES, key=blake2b(salt, digest_size=blake2b.MAX_KEY_SIZE).digest())

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Raises OverflowError for an id that is no unsigned 32-bit number."""
        self._state.update(array("I", tokens))

    @property
    def value(self) -> int:
        """The hash of all tokens so far, 64 bits."""
        return int.from_bytes(self._state.digest())


def choose_token(value: int, vocabulary_size: int, allowed: Sequence[int], avoided: Collection[int]) -> int:
    """The token that a hash stands for.

    Args:
        value: the hash of all tokens before.
        vocabulary_size: tokens to choose from are below it, unless `allowed` names them.
        allowed: if not empty, the only tokens to choose from.
        avoided: tokens not to choose as long as there are others.
    """
    choices = len(allowed) or vocabulary_size
    token = 0
    # Neighbours are distinct, so one more than there are avoided tokens must contain another.
    for offset in range(len(avoided) + 1):
        index = (value + offset) % choices
        token = allowed[index] if allowed else index
        if token not in avoided:
            break
    return token
