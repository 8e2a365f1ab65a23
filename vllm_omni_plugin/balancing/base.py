"""The contract between the stage pool, which needs a replica, and a policy, which chooses one."""

from abc import abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol, TypedDict, runtime_checkable


class LoadBalancingPolicy(StrEnum):
    """The built-in policies, by the name a user gives them."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_QUEUE_LENGTH = "least-queue-length"


class Task(TypedDict, total=False):
    """What a policy may know of the request it places. Every key may be absent."""

    request_id: str
    # Typed by the engine that will run the request, which this layer does not know.
    engine_inputs: Any
    sampling_params: Any


class ReplicaView(Protocol):
    """What a policy may know of a replica. Stage and addresses identify it and never change during its life."""

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


def require_replicas(replicas: Sequence[ReplicaView]) -> None:
    """Raise ValueError when there is nothing to choose from."""
    if not replicas:
        raise ValueError("replicas must not be empty")
