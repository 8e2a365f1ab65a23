"""Runs nodes as actors of a Ray cluster. The only module that imports Ray."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vllm_omni_plugin.errors import ConfigError, OmniError
from vllm_omni_plugin.ray.node_process import NodeProcess, ReplicaMachines

_CALLS_AT_ONCE = 16
"""Concurrent calls of an actor: repeated calls of `wait` must leave room for `end`."""
AWAY_S = 60.0
"""An actor that is unreachable for longer counts as lost."""


class NodeEvent(NamedTuple):
    """A node was placed on `host`, or (None) has ended; `end` is its exit code, or the reason why it was lost."""

    number: int
    host: str | None
    end: int | str = 0


class NodeKind(NamedTuple):
    """The arguments of `vllm serve` of some nodes, and what Ray reserves for each of them.

    With a `group`, each node is a replica over several machines, and Ray reserves so much on each.
    """

    arguments: Sequence[str]
    gpus: int
    cpus: int
    group: ReplicaMachines | None = None


class RayNodes:
    """Starts, drains and kills nodes on a Ray cluster, and reports their events. `close` makes Ray kill all nodes.

    Raises ConfigError if Ray is not installed, and OmniError if the cluster cannot be reached.
    """

    def __init__(self, address: str, kinds: Sequence[NodeKind]) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ConfigError("Ray is not installed: pip install 'vllm-omni-plugin[ray]'") from error
        self._ray: Any = ray
        try:
            ray.init(address=address)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise OmniError(f"argument --address: no Ray cluster at {address}: {_line(error)}") from error
        self._here = ray.get_runtime_context().get_node_id()
        # An actor's resources are on one machine, so a node of one machine needs no placement group.
        self._kinds = [
            (ray.remote(num_gpus=kind.gpus, num_cpus=kind.cpus, max_concurrency=_CALLS_AT_ONCE)(NodeProcess), kind)
            for kind in kinds
        ]
        # Of each node, one for each of its machines, the first one first.
        self._actors: dict[int, list[Any]] = {}
        self._draining: set[int] = set()
        self._placement: dict[int, Any] = {}
        self._calls: dict[Any, tuple[int, Any, str, float]] = {}

    def close(self) -> None:
        self._ray.shutdown()

    def start(self, number: int, kind: int = 0) -> None:
        """Request a node of a kind. Ray places it when there is room."""
        actor_class, of_kind = self._kinds[kind]
        if of_kind.group is None:
            actors = [actor_class.remote(list(of_kind.arguments))]
        else:
            actors = self._start_group(number, actor_class, of_kind, of_kind.group)
        self._actors[number] = actors
        self._call(number, actors[0], "host")
        for actor in actors:
            self._call(number, actor, "wait")

    def _start_group(self, number: int, actor_class: Any, kind: NodeKind, group: ReplicaMachines) -> list[Any]:
        """Request all machines of a replica at once: with a part of them it could not start."""
        util = self._ray.util
        bundle = {name: amount for name, amount in (("GPU", kind.gpus), ("CPU", kind.cpus)) if amount}
        placement = util.placement_group([bundle] * group.machines, strategy="STRICT_SPREAD")
        self._placement[number] = placement
        actors: list[Any] = []
        first = None
        for rank in range(group.machines):
            place = util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=placement, placement_group_bundle_index=rank
            )
            actor = actor_class.options(scheduling_strategy=place).remote(list(kind.arguments), group, rank, first)
            # Ray starts the others when the first one has answered.
            first = first or actor.meeting_address.remote()
            actors.append(actor)
        return actors

    def drain(self, number: int) -> None:
        """Make a node finish its requests and end, with the last of its machines."""
        self._draining.add(number)
        for actor in self._actors[number]:
            actor.end.remote()

    def kill(self, number: int) -> None:
        """End a node at once, or cancel its request."""
        self._draining.discard(number)
        for actor in self._actors[number]:
            self._ray.kill(actor)

    def events(self, timeout: float) -> Iterator[NodeEvent]:
        """Wait up to `timeout` seconds for events. Raises OmniError if Ray has ended on this machine."""
        if not self._calls:
            time.sleep(timeout)
            return
        calls = list(self._calls)
        done, _ = self._ray.wait(calls, timeout=timeout)
        if done:
            done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        for call in done:
            event = self._read(call, *self._calls[call])
            del self._calls[call]
            if event is not None:
                yield event

    def _call(self, number: int, actor: Any, method: str, give_up: float = 0.0) -> None:
        self._calls[getattr(actor, method).remote()] = (number, actor, method, give_up)

    def _read(self, call: Any, number: int, actor: Any, method: str, give_up: float) -> NodeEvent | None:
        """What a node's actor says; one that is unreachable is asked again for `AWAY_S`, and then lost."""
        if number not in self._actors:
            return None
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            if not any(node["Alive"] for node in self._ray.nodes() if node["NodeID"] == self._here):
                message = "Ray on this machine has ended, and all nodes with it: start Ray and this command again"
                raise OmniError(message) from error
            # Each attempt takes Ray a second.
            now = time.monotonic()
            give_up = give_up if now < give_up + AWAY_S else now + AWAY_S
            if isinstance(error, self._ray.exceptions.ActorUnavailableError) and now < give_up:
                self._call(number, actor, method, give_up)
                return None
            # The call of `wait` fails, too, and makes the event.
            if method == "host":
                return None
            answer = _line(error)
        if method == "host":
            return NodeEvent(number, answer)
        if number in self._draining and len(self._actors[number]) > 1:
            self._actors[number].remove(actor)
            return None
        # Frees the resources, and ends a node that is only unreachable, since another one replaces it; and the other
        # machines of its replica.
        self.kill(number)
        del self._actors[number]
        if number in self._placement:
            self._ray.util.remove_placement_group(self._placement.pop(number))
        return NodeEvent(number, None, answer)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
