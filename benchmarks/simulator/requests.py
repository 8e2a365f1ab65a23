"""What is asked of a simulated fleet, and one attempt at it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_omni_plugin.admission import RequestTerms
from vllm_omni_plugin.balancing import Prompt, Task
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys

Tokens = Sequence[int]
_NO_TERMS = RequestTerms()


class Request:
    """One request of a client, and what became of it.

    Args:
        number: counts the requests of a workload.
        prompt: token ids.
        answer: token ids it will be answered with, whichever engine does it.
        max_tokens: what the client allows; the answer is rarely that long.
        session: the conversation it belongs to.
        terms: what the client says of itself.

    Attributes:
        tokens: prompt and answer.
        arrived: seconds at which the client sent it.
        first_token: seconds at which the head had its first token, or None before.
        finished: seconds at which the head had its last token, or None before.
        cached_tokens: prompt tokens that the engine of its last attempt took from its cache.
        moves: how often its replica was lost.
        produced: tokens of the answer that lost replicas have given.
    """

    def __init__(
        self,
        number: int,
        prompt: Tokens,
        answer: Tokens,
        max_tokens: int,
        session: str | None,
        terms: RequestTerms = _NO_TERMS,
    ) -> None:
        self.number = number
        self.prompt_tokens = len(prompt)
        self.output_tokens = len(answer)
        self.tokens = array("I", prompt) + array("I", answer)
        self.max_tokens = max_tokens
        self.session = session
        self.terms = terms
        self.arrived = 0.0
        self.first_token: float | None = None
        self.finished: float | None = None
        self.cached_tokens = 0
        self.moves = 0
        self.produced = 0

    def task(self) -> Task:
        """What a policy may know of the next attempt; the tokens that were produced are part of its prompt."""
        return Task(
            request_id=f"{self.number}-{self.moves}",
            engine_inputs=self,
            prompt=Prompt(self.tokens[: self.prompt_tokens + self.produced]),
            session=self.session,
            max_tokens=self.max_tokens - self.produced,
        )

    def job(self, block_size: int) -> "Job":
        """The next attempt as an engine sees it."""
        keys = prompt_keys(Prompt(self.tokens), block_size)
        return Job(self.prompt_tokens + self.produced, self.output_tokens - self.produced, keys, self)


@dataclass(slots=True, eq=False)
class Job:
    """One attempt, as an engine sees it.

    Attributes:
        prompt_tokens: at least one.
        output_tokens: tokens it will produce, at least one.
        keys: of the blocks that prompt and answer fill; the prompt's come first.
        request: whose attempt it is.
        computed: prompt tokens whose KV entries are there.
        cached_tokens: how many of these are expected to be there, and from its admission on, how many were.
        first_iteration: decoding iteration of the engine that gave the first token.
        shared: blocks in the cache that it holds.
        reserved: blocks beyond these that it may come to need.
    """

    prompt_tokens: int
    output_tokens: int
    keys: list[int]
    request: Request
    computed: int = 0
    cached_tokens: int = 0
    first_iteration: int = 0
    shared: int = 0
    reserved: int = 0

    @property
    def answer(self) -> Tokens:
        """The tokens it will produce."""
        return self.request.tokens[self.prompt_tokens :]


@dataclass(slots=True, eq=False)
class Session:
    """Requests that follow each other, each some time after the answer to the one before.

    Attributes:
        starts: seconds at which the first arrives.
        turns: the requests.
        pauses: seconds before each of them but the first.
    """

    starts: float
    turns: list[Request]
    pauses: list[float] = field(default_factory=list)
