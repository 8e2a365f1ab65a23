"""Nodes as actors of a Ray cluster. The only module that imports Ray."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni_plugin.errors import ConfigError, OmniError
from vllm_omni_plugin.ray.node_process import NodeProcess

_CALLS_AT_ONCE = 3
"""Of an actor: one waits for its node to end, one tells it to, one says where it is."""


@dataclass(frozen=True)
class Placed:
    """A node runs on this machine."""

    number: int
    host: str


@dataclass(frozen=True)
class Ended:
    """A node is gone: the exit code of its process, or why it was lost."""

    number: int
    how: int | str


class RayNodes:
    """Starts, drains and kills nodes on a Ray cluster, and tells what became of them.

    A context manager. What still runs when it is left is killed by Ray.

    Args:
        address: of the cluster, as `ray.init` takes it.
        arguments: those of `vllm serve` for each node.
        gpus: GPUs of each node, all on one machine.
        cpus: CPUs of each node.

    Raises:
        ConfigError: Ray is not installed.
        OmniError: the cluster cannot be reached.
    """

    def __init__(self, address: str, arguments: Sequence[str], gpus: int, cpus: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("Ray is not installed: pip install 'vllm-omni-plugin[ray]'") from error
        self._ray: Any = ray
        self._arguments = list(arguments)
        try:
            ray.init(address=address)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise OmniError(f"argument --address: no Ray cluster at {address}: {_line(error)}") from error
        # An actor's resources lie on one machine, so that a node needs no placement group.
        self._actor_class = ray.remote(num_gpus=gpus, num_cpus=cpus, max_concurrency=_CALLS_AT_ONCE)(NodeProcess)
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, tuple[int, type[Placed] | type[Ended]]] = {}

    def __enter__(self) -> "RayNodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def start(self, number: int) -> None:
        """Ask for a node. Ray places it when there is room."""
        actor = self._actors[number] = self._actor_class.remote(self._arguments)
        self._calls[actor.host.remote()] = (number, Placed)
        self._calls[actor.wait.remote()] = (number, Ended)

    def drain(self, number: int) -> None:
        """Tell a node to finish what it has and end."""
        self._actors[number].end.remote()

    def kill(self, number: int) -> None:
        """End a node at once, or take back that it was asked for."""
        self._ray.kill(self._actors[number])

    def news(self, timeout: float) -> list[Placed | Ended]:
        """Wait at most `timeout` seconds for something to happen to a node; returns what did."""
        if not self._calls:
            time.sleep(timeout)
            return []
        done, _ = self._ray.wait(list(self._calls), timeout=timeout)
        return [news for call in done if (news := self._answer(call)) is not None]

    def _answer(self, call: Any) -> Placed | Ended | None:
        number, kind = self._calls.pop(call)
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            # Both calls fail; one of them says so.
            if kind is Placed:
                return None
            answer = _line(error)
        if kind is Placed:
            return Placed(number, answer)
        # Frees its resources, and ends a node that Ray has only lost sight of: another one takes its place.
        self._ray.kill(self._actors.pop(number))
        return Ended(number, answer)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
