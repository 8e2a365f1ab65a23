"""Nodes as actors of a Ray cluster. The only module that imports Ray."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni_plugin.errors import ConfigError, OmniError
from vllm_omni_plugin.ray.node_process import NodeProcess

_CALLS_AT_ONCE = 16
"""Of an actor: those that ask again and again how its node ended must leave room for the one that tells it to end."""
AWAY_S = 60.0
"""How long an actor may be out of reach before it counts as lost."""


@dataclass(frozen=True)
class News:
    """Of a node: the machine that it runs on. If None, it is gone: the exit code of its process, or why it was lost."""

    number: int
    host: str | None
    how: int | str = 0


class RayNodes:
    """Starts, drains and kills nodes on a Ray cluster, and tells what became of them.

    To be closed. What still runs then is killed by Ray.

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
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ConfigError("Ray is not installed: pip install 'vllm-omni-plugin[ray]'") from error
        self._ray: Any = ray
        self._arguments = list(arguments)
        try:
            ray.init(address=address)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise OmniError(f"argument --address: no Ray cluster at {address}: {_line(error)}") from error
        self._here = ray.get_runtime_context().get_node_id()
        # An actor's resources lie on one machine, so that a node needs no placement group.
        self._actor_class = ray.remote(num_gpus=gpus, num_cpus=cpus, max_concurrency=_CALLS_AT_ONCE)(NodeProcess)
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, tuple[int, str, float]] = {}

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()

    def start(self, number: int) -> None:
        """Ask for a node. Ray places it when there is room."""
        self._actors[number] = self._actor_class.remote(self._arguments)
        for method in ("host", "wait"):
            self._ask(number, method)

    def drain(self, number: int) -> None:
        """Tell a node to finish what it has and end."""
        self._actors[number].end.remote()

    def kill(self, number: int) -> None:
        """End a node at once, or take back that it was asked for."""
        self._ray.kill(self._actors[number])

    def news(self, timeout: float) -> Iterator[News]:
        """Wait at most `timeout` seconds for something to happen to a node; tells what did.

        Raises:
            OmniError: Ray has ended on this machine. Actors do not outlive it, since they belong to this process.
        """
        if not self._calls:
            time.sleep(timeout)
            return
        calls = list(self._calls)
        done, _ = self._ray.wait(calls, timeout=timeout)
        if done:
            done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        for call in done:
            news = self._answer(call, *self._calls[call])
            del self._calls[call]
            if news is not None:
                yield news

    def _ask(self, number: int, method: str, give_up: float = 0.0) -> None:
        self._calls[getattr(self._actors[number], method).remote()] = (number, method, give_up)

    def _answer(self, call: Any, number: int, method: str, give_up: float) -> News | None:
        if number not in self._actors:
            return None
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            if not any(node["Alive"] for node in self._ray.nodes() if node["NodeID"] == self._here):
                message = "Ray on this machine has ended, and all nodes with it: start Ray and this command again"
                raise OmniError(message) from error
            # Ray takes a second for each of these.
            now = time.monotonic()
            give_up = give_up if now < give_up + AWAY_S else now + AWAY_S
            if isinstance(error, self._ray.exceptions.ActorUnavailableError) and now < give_up:
                self._ask(number, method, give_up)
                return None
            # Both calls fail; one of them says so.
            if method == "host":
                return None
            answer = _line(error)
        if method == "host":
            return News(number, answer)
        # Frees its resources, and ends a node that Ray has only lost sight of: another one takes its place.
        self._ray.kill(self._actors.pop(number))
        return News(number, None, answer)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
