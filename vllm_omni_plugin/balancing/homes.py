"""Where heads that do not hear of each other's prompts look for one that they have not sent themselves."""

from collections.abc import Collection, Sequence

from vllm_omni_plugin.balancing.base import ReplicaView
from vllm_omni_plugin.balancing.block_keys import prompt_keys
from vllm_omni_plugin.balancing.matching import Home, TokenLevels
from vllm_omni_plugin.balancing.prompt import Prompt
from vllm_omni_plugin.balancing.rendezvous import RendezvousTable

_EXPECTED_SHARE = 0.75
"""What a home is expected to have of what is unknown. Chosen with benchmarks/spread.py: more unites a few more prompts
that belong together, and spreads prompts that have nothing in common less evenly."""


class PromptHomes:
    """Gives each prompt a home, the same on all heads.

    A prompt of which a head knows less than a half is perhaps known to another. So the first block that it does not
    know has a home, see `RendezvousTable`: prompts with a common beginning, of which a head knows nothing, have the
    same, and those that differ only behind a beginning that everybody knows have not.
    """

    def __init__(self) -> None:
        self._table = RendezvousTable()

    def find(
        self, replicas: Sequence[ReplicaView], prompt: Prompt, levels: TokenLevels, block_sizes: Collection[int]
    ) -> Home | None:
        """The home of a prompt, None if it needs none, since enough of it is known.

        Args:
            replicas: of the fleet.
            prompt: which may have less than a block.
            levels: who is known to have how much of it.
            block_sizes: tokens in a block, all that occur.
        """
        known = levels[0][0] if levels else 0
        unknown = len(prompt.token_ids) - known
        if unknown <= known:
            return None
        block_size = min(block_sizes)
        keys = prompt_keys(prompt, block_size)
        if known // block_size >= len(keys):
            return None
        self._table.follow(replicas)
        key = keys[known // block_size].to_bytes(8, "little")
        return Home(self._table.position(key), _EXPECTED_SHARE * unknown)
