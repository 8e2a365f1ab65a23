"""Requests to a simulated fleet, and their attempts."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_omni_plugin.admission import RequestTerms
from vllm_omni_plugin.balancing import Prompt, Task
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys

Tokens = Sequence[int]
_NO_TERMS = RequestTerms()


class Request:
    """One request of a client, and its result.

    Args:
        number: unique in a workload.
        prompt: token ids.
        answer: token ids of the answer, the same on every engine.
        max_tokens: the client's limit; the answer is usually shorter.

    Attributes:
        tokens: of prompt and answer.
        arrived: seconds at which the client sent it.
        first_token: seconds at which the head had the first token; None before.
        finished: seconds at which the head had the last token; None before.
        cached_tokens: prompt tokens that the engine of the last attempt had cached.
        moves: how often its replica was lost.
        produced: answer tokens from lost replicas.
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
        """What a policy may know of the next attempt. Tokens that were produced are part of its prompt."""
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
        output_tokens: tokens that it will produce, at least one.
        keys: of the blocks that prompt and answer fill; the prompt's blocks come first.
        computed: prompt tokens with KV entries.
        cached_tokens: prompt tokens expected in the cache; once admitted, those that were there.
        first_iteration: the engine's iteration of the first token.
        shared: blocks in the cache that it uses.
        reserved: further blocks that it may need.
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
        return self.request.tokens[self.prompt_tokens :]


@dataclass(slots=True, eq=False)
class Session:
    """Requests that follow each other, each some time after the previous answer.

    Attributes:
        starts: seconds at which the first request arrives.
        pauses: seconds before each request except the first.
    """

    starts: float
    turns: list[Request]
    pauses: list[float] = field(default_factory=list)
