"""The longest request that the engines of one stage must take."""

from vllm_omni_plugin.errors import ReplicaError


class PromisedLength:
    """The tokens of prompt and answer that vLLM's server allows a request, as the first engines of the stage hold them.

    With `--max-model-len -1` each engine fits the length to its own memory, and dies of a longer request. vLLM's server
    takes the shortest length of the engines that it starts with, or that of the first one that joins, and keeps it.
    """

    def __init__(self) -> None:
        self._tokens = 0

    def keep(self, tokens: int, at_start: bool) -> None:
        """An engine with this length serves.

        Args:
            tokens: 0: unknown.
            at_start: whether the server waits for it and takes its length.
        """
        if not self._tokens or (at_start and tokens):
            self._tokens = min(tokens, self._tokens or tokens)

    def check(self, tokens: int, at_start: bool) -> None:
        """Raise ReplicaError if an engine with this length would die of a request that the server allows."""
        if tokens and tokens < self._tokens and not at_start:
            raise ReplicaError(
                f"its engine has memory for a max model length of {tokens} tokens (--max-model-len -1), and this head "
                f"has promised its clients {self._tokens}: give the head and all nodes --max-model-len {tokens}, or "
                "this replica more memory"
            )
