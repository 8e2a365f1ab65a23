"""The contract between the stage pool, which needs a replica, and a policy, which chooses one for a prompt."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypedDict, runtime_checkable

from msgspec import Struct

_UNKNOWN_PROMPT = 512
"""Tokens of a prompt whose length nobody told."""


class MediaSpan(NamedTuple):
    """Where a multimodal input stands in a prompt.

    Attributes:
        identifier: hash of its content.
        offset: first of its placeholder tokens.
        length: number of these.
    """

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What decides which cached blocks a request can use.

    Attributes:
        token_ids: the prompt; its length alone counts where `cacheable` is false.
        lora_name: the adapter, "" for none.
        cache_salt: shares blocks only with prompts of the same salt, "" for none.
        media: multimodal inputs, in order of their offsets.
        cacheable: whether the engine may take blocks of this prompt from its cache.
    """

    token_ids: Sequence[int]
    lora_name: str = ""
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    cacheable: bool = True
    # By block size, once they were asked for: a request is hashed once, whoever asks how often.
    known_keys: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)


NO_PROMPT = Prompt((), cacheable=False)
"""Of a request whose prompt is not known."""


class LoadBalancingPolicy(StrEnum):
    """The built-in policies, by the name a user gives them."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_QUEUE_LENGTH = "least-queue-length"
    POWER_OF_TWO = "power-of-two"
    LEAST_TOKENS = "least-tokens"
    SESSION = "session"
    PREFIX = "prefix"
    KV_AWARE = "kv-aware"
    COST_AWARE = "cost-aware"


class Task(TypedDict, total=False):
    """What a policy may know of the request it places. Every key may be absent.

    Neither its priority nor its adapter is among them, since all replicas that serve take both alike: priority
    counts in an engine's own queue, and adapters tell blocks of `prompt` apart.
    """

    request_id: str
    # Typed by the engine that will run the request, which this layer does not know.
    engine_inputs: Any
    sampling_params: Any
    prompt: Prompt
    # Requests of one session share a growing prompt.
    session: str | None
    # Tokens that the answer may have at most.
    max_tokens: int | None
    # Tokens of the answer, as far as the client got them; there when the attempt has `ended` and not before.
    answer_ids: Sequence[int]


class ReplicaView(Protocol):
    """What a policy may know of a replica. Stage and addresses identify it and never change during its life.

    The fleet's replicas have two more attributes: `replica_id`, which is the same after a restart, and `load`, a
    `ReplicaLoad`; ask for the latter by `load_of`, which takes any replica.
    """

    @property
    def input_addr(self) -> str:
        """Address its requests are sent to."""

    @property
    def output_addr(self) -> str:
        """Address its outputs come from."""

    @property
    def stage_id(self) -> int:
        """Stage it serves."""

    @property
    def queue_length(self) -> int:
        """Requests it has accepted and not finished; never negative."""


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
        by_policy: false: the pool chose in the policy's place, and what the replica has cached is not known.
    """

    position: int
    reason: str
    candidates: tuple[Candidate, ...] = ()
    fallback: str = ""
    matched_tokens: int = 0
    by_policy: bool = True


class CacheChange(NamedTuple):
    """What an engine reports of its prefix cache: blocks by their `block_keys`, first the removed, then the stored.

    Attributes:
        stored: blocks that can be reused from here on.
        removed: blocks that no longer can.
        restart: all that was known before is void: the cache was cleared, or reports of it begin or were lost.
        complete: false: reports were lost, and nothing of the cache is known until the next `restart`.
    """

    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    restart: bool = False
    complete: bool = True


@runtime_checkable
class LoadBalancer(Protocol):
    """A policy. Any class with this `select`, and a constructor that needs no argument, is one; no need to inherit."""

    @abstractmethod
    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        """Return the index in `replicas` of the one that shall run `task`.

        Called in the request path, for one stage, with the replicas that can take work now: it must neither block nor
        keep or change `task`.

        Raises:
            ValueError: `replicas` is empty.
        """


@runtime_checkable
class DecidingBalancer(LoadBalancer, Protocol):
    """A policy that can say why. The pool asks `decide` alone."""

    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        """The position that `decide` names."""
        return self.decide(task, replicas).position

    @abstractmethod
    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """Choose as `select` does, and change nothing but the state of a random generator: what is to be remembered of
        a choice is remembered in `dispatched`, so that a choice can be explained without being made.

        Raises:
            ValueError: `replicas` is empty.
        """


class PolicyHooks(Protocol):
    """What a policy may be told, each method if it has it. All are called on the loop that calls `select`.

    For one attempt of a request come `dispatched`, `began` and `ended`, in this order; without `began` if the attempt
    ended before its first output. `replica_lost` ends all attempts of a replica at once, without `ended` for each.
    """

    def dispatched(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """A request goes to a replica; not always the one chosen, since some requests are bound to one."""

    def dispatch_cancelled(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """What the policy itself had decided was refused or given up before its engine got it; `ended` follows."""

    def began(self, task: Task, replica: ReplicaView, cached_tokens: int | None) -> None:
        """Its first output came; the engine took so many prompt tokens from its cache, None if it did not say."""

    def ended(self, task: Task, replica: ReplicaView, seconds: float, output_tokens: int) -> None:
        """It is over, for whatever reason, after so many seconds on this replica and tokens from it."""

    def replica_lost(self, replica: ReplicaView) -> None:
        """The replica is lost: its engine's cache and all that ran there are gone."""

    def cache_cleared(self, replica: ReplicaView) -> None:
        """Its engine has dropped all it had cached, because it was told to. Comes before the engine reports it."""

    def cache_changed(self, replica: ReplicaView, change: CacheChange) -> None:
        """The engine reported what it has cached. Some never do; with an attribute `wants_cache_events` that is true,
        the engines that a head starts for itself are made to, like all others."""


def require_replicas(replicas: Sequence[ReplicaView]) -> None:
    """Raise ValueError when there is nothing to choose from."""
    if not replicas:
        raise ValueError("replicas must not be empty")


def prompt_tokens(task: Task) -> int:
    """Tokens of a request's prompt; 512 if the task has none."""
    prompt = task.get("prompt")
    return _UNKNOWN_PROMPT if prompt is None else len(prompt.token_ids)
