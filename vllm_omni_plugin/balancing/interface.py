"""The interface between a stage pool and its policy, which chooses a replica for each request."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypedDict, runtime_checkable

from msgspec import Struct, field

_UNKNOWN_PROMPT = 512
"""Assumed length of an unknown prompt, in tokens."""


class MediaSpan(NamedTuple):
    """The placeholder tokens of one multimodal input in a prompt; `identifier` is a hash of the input's content."""

    identifier: str
    offset: int
    length: int


class Prompt(Struct, frozen=True, eq=False):
    """What determines which cached blocks a request can use.

    If `cacheable` is false, the engine takes no blocks from its cache, and only the length of `token_ids` is used. Only
    prompts with the same `cache_salt` share blocks. `media` is in order of offsets.
    """

    token_ids: Sequence[int]
    lora_name: str = ""
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    cacheable: bool = True
    # By block size, so that a prompt is hashed at most once for each.
    known_keys: dict[int, list[int]] = field(default_factory=dict)


NO_PROMPT = Prompt((), cacheable=False)
"""The prompt of a request whose prompt is not known."""


class LoadBalancingPolicy(StrEnum):
    """Names of the built-in policies."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_QUEUE_LENGTH = "least-queue-length"
    LEAST_TOKENS = "least-tokens"
    SESSION = "session"
    PREFIX = "prefix"
    KV_AWARE = "kv-aware"


class Task(TypedDict, total=False):
    """What a policy may know of the request that it places. Every key may be absent.

    Priority is not among them: it counts in an engine's own queue, and all replicas treat it alike. The LoRA adapter is
    part of `prompt`.
    """

    request_id: str
    # Its type belongs to the engine, which this layer does not know.
    engine_inputs: Any
    sampling_params: Any
    prompt: Prompt
    # Requests of one session share a growing prompt.
    session: str | None
    # Upper bound of the answer, in tokens.
    max_tokens: int | None
    # Token ids of the answer that the client has received; set only in `PolicyHooks.ended`.
    answer_ids: Sequence[int]


class ReplicaView(Protocol):
    """What a policy may know of a replica. The stage and the addresses identify the replica and never change.

    Replicas of a fleet also have `replica_id`, which stays the same over a restart, and `load`, a `ReplicaLoad`. Read
    the load with `load_of`, which accepts any replica.
    """

    @property
    def input_addr(self) -> str: ...

    @property
    def output_addr(self) -> str: ...

    @property
    def stage_id(self) -> int: ...

    @property
    def queue_length(self) -> int:
        """Number of unfinished requests; never negative."""


# Structs: a named tuple takes four times as long to create, and a decision has up to eight candidates.
class Candidate(Struct, frozen=True, order=True, gc=False):
    """A compared replica: its index, its score (the lowest wins) and its expected cached prompt tokens."""

    position: int
    score: float
    matched_tokens: int = 0


class Decision(Struct, frozen=True, gc=False):
    """A policy's choice.

    Attributes:
        position: index of the chosen replica in the sequence that the policy was given.
        reason: what decided, as a metric label with few different values, such as `least-load` or `session`.
        candidates: all compared replicas, including the chosen one; empty if none were compared.
        fallback: why the policy could not apply its full rule, as a metric label; "" if it could.
        matched_tokens: prompt tokens that the chosen replica is expected to have cached.
        by_policy: false if the pool chose instead of the policy; the cached tokens are unknown then.
    """

    position: int
    reason: str
    candidates: tuple[Candidate, ...] = ()
    fallback: str = ""
    matched_tokens: int = 0
    by_policy: bool = True


class CacheChange(NamedTuple):
    """A report of an engine's prefix cache. Blocks are named by their `block_keys`; apply `removed` before `stored`.

    Attributes:
        restart: discard all earlier reports: the cache was cleared, or reporting starts again.
        complete: false if reports were lost; the cache is unknown until the next `restart`.
    """

    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    restart: bool = False
    complete: bool = True


@runtime_checkable
class LoadBalancer(Protocol):
    """A policy: any class with this `select` and a constructor that needs no argument. It need not inherit."""

    @abstractmethod
    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        """Return the index of the replica that shall run `task`. Raises ValueError if `replicas` is empty.

        It is called in the request path with the replicas of one stage that can take work now. It must not block, and
        must not keep or change `task`.
        """


@runtime_checkable
class DecidingBalancer(LoadBalancer, Protocol):
    """A policy that explains its choice. The pool calls only `decide`."""

    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        return self.decide(task, replicas).position

    @abstractmethod
    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        """Choose a replica and give the reason. Raises ValueError if `replicas` is empty.

        It may change no state except that of a random generator, because `POST /omni/explain` calls it without sending
        a request. Record a choice in `PolicyHooks.assigned` instead.
        """


class PolicyHooks(Protocol):
    """Optional methods of a policy. Each is called on the orchestrator's loop, like `select`, if the policy has it.

    For one attempt of a request the calls are `assigned`, `began` (unless it ended before its first output) and
    `ended`. `replica_lost` ends all attempts of a replica, without `ended` for each.
    """

    def assigned(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """A request is assigned to a replica. This need not be the chosen one: some requests are bound to a replica."""

    def assignment_cancelled(self, task: Task, replica: ReplicaView, decision: Decision) -> None:
        """A request that this policy placed was refused or aborted before the engine received it; `ended` follows."""

    def began(self, task: Task, replica: ReplicaView, cached_tokens: int | None) -> None:
        """The first output has come; `cached_tokens` of the prompt were cached (None: not reported)."""

    def ended(self, task: Task, replica: ReplicaView, seconds: float, output_tokens: int) -> None:
        """The attempt is over, for any reason, after `seconds` and `output_tokens` on this replica."""

    def replica_lost(self, replica: ReplicaView) -> None:
        """The replica is lost, with its cache and all its requests."""

    def cache_cleared(self, replica: ReplicaView) -> None:
        """The engine dropped its cache because an operator asked for it. Called before the engine reports it."""

    def cache_changed(self, replica: ReplicaView, change: CacheChange) -> None:
        """The engine reported a change of its cache. Some engines never report.

        If the class has `wants_cache_events = True`, the engines that a head starts for itself report, too.
        """


identity_of: Callable[[ReplicaView], tuple[int, str, str]] = attrgetter("stage_id", "input_addr", "output_addr")
"""What identifies a replica."""


def snapshot_of(replicas: Sequence[ReplicaView]) -> tuple[ReplicaView, ...]:
    """A tuple of the replicas. A list is copied, since it may change in place; the pool's tuple is returned itself."""
    return replicas if isinstance(replicas, tuple) else tuple(replicas)


def require_replicas(replicas: Sequence[ReplicaView]) -> None:
    if not replicas:
        raise ValueError("replicas must not be empty")


def prompt_tokens(task: Task) -> int:
    """Length of the prompt; 512 if the task has no prompt."""
    prompt = task.get("prompt")
    return _UNKNOWN_PROMPT if prompt is None else len(prompt.token_ids)
