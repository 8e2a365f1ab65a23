"""Starts the ranks of lockstep groups: the engines of `--data-parallel-size` for a mixture of experts.

The ranks of a group compute every step together, so they start and end together. Outside the launcher, each rank is a
replica of its own.
"""

import copy
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.distributed.utils import create_tcp_store
from vllm.v1.engine.coordinator import DPCoordinator

from vllm_omni_plugin.errors import ConfigError, ReplicaError
from vllm_omni_plugin.vllm_api.launch.engine_launch import EngineLauncher, EngineProcess, assign_devices
from vllm_omni_plugin.vllm_api.launch.kv_event_settings import turn_on_cache_events
from vllm_omni_plugin.vllm_api.launch.lockstep import GroupIncarnation, StartBarrier
from vllm_omni_plugin.vllm_api.launch.machines_launch import MachinesLauncher, OverMachines
from vllm_omni_plugin.vllm_api.launch.spawning import SPAWN_LOCK, NodeShare, remove_ipc_files


def set_own_ranks(engine_args: Any) -> None:
    """Give the ranks of this machine of several as vLLM's flags for ranks do, since `--nnodes` limits the executors."""
    ranks = engine_args.data_parallel_size // engine_args.nnodes
    engine_args.data_parallel_size_local = ranks
    engine_args.data_parallel_start_rank = engine_args.node_rank * ranks
    engine_args.data_parallel_address = engine_args.master_addr
    engine_args.nnodes, engine_args.node_rank = 1, 0


def split_ranks(vllm_config: Any) -> tuple[Any, int]:
    """Split the configuration of the engines from that of the front end.

    Returns the configuration of each engine, and the number of ranks on this machine. With several ranks
    (`--data-parallel-size`), `vllm_config` then has one: each rank is a replica, so vLLM's front end must see a single
    rank. Raises ConfigError if the ranks of a dense model are to be on several machines.
    """
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size == 1:
        return vllm_config, 1
    ranks: int = parallel.data_parallel_size_local
    if ranks < parallel.data_parallel_size and not vllm_config.model_config.is_moe:
        raise ConfigError(
            f"argument --data-parallel-size: {parallel.data_parallel_size} ranks of a dense model are independent: "
            "instead of --nnodes, start a node with --omni-dp-size-local on each machine"
        )
    engine_config = copy.copy(vllm_config)
    engine_config.parallel_config = copy.copy(vllm_config.parallel_config)
    vllm_config.parallel_config.reconfigure_for_independent_dp_rank()
    return engine_config if vllm_config.model_config.is_moe else vllm_config, ranks


def new_launcher(
    engine_config: Any,
    executor_class: Any,
    log_stats: bool,
    share: NodeShare,
    on_spawn: Callable[[int], None],
    *,
    report_cache: bool,
    numbers: Sequence[int],
    for_others: bool = False,
    first_incarnation: int = 0,
) -> EngineLauncher:
    """The launcher for this configuration. `for_others` (heads of other processes) makes no difference here."""
    parallel = engine_config.parallel_config
    kind: type[EngineLauncher] = MachinesLauncher if parallel.nnodes > 1 else EngineLauncher
    if parallel.data_parallel_size > 1:
        own_ranks = parallel.data_parallel_size_local
        kind = GroupLauncher if own_ranks == parallel.data_parallel_size else MachinesGroupLauncher
    return kind(engine_config, executor_class, log_stats, on_spawn, numbers, report_cache, share, first_incarnation)


@dataclass(eq=False)
class GroupLauncher(EngineLauncher):
    """Starts ranks: with K ranks of a group on this machine, replica i is the rank i % K of them in group i // K.

    The start of a rank waits until all ranks of its group start. When a rank exits for any reason, all others are
    killed, and their owners must start all of them again.
    """

    def __post_init__(self) -> None:
        self._ranks: int = self.vllm_config.parallel_config.data_parallel_size_local
        self._lock = threading.Lock()
        self._barriers: dict[int, StartBarrier] = {}

    def group_of(self, replica_id: int) -> range:
        """All replicas of this replica's group, which start and end together."""
        first = replica_id - replica_id % self._ranks
        return range(first, first + self._ranks)

    def turn(self, replica_id: int) -> AbstractAsyncContextManager[None]:
        """At once: the ranks of a group wait for each other, and must not wait for those of another group as well."""
        return nullcontext()

    def start(self, replica_id: int) -> "RankProcess":  # type: ignore[override]
        """Prepare the start of a rank. `RankProcess.wait` spawns the process once all ranks of its group start."""
        group, rank = divmod(replica_id, self._ranks)
        config = copy.deepcopy(self.vllm_config)
        if group > 0:
            # The first group uses the devices that vLLM itself would use.
            assign_devices(config, group * self._ranks * config.parallel_config.world_size, self._ranks)
        self._set_identity(config, replica_id)
        if self.report_cache:
            turn_on_cache_events(config)
        spawn = partial(self._spawn, config, self._index(replica_id), rank)
        return RankProcess(self._barrier(group), rank, spawn, config.parallel_config)

    def _index(self, replica_id: int) -> int:
        return replica_id % self._ranks

    def _barrier(self, group: int) -> StartBarrier:
        with self._lock:
            if group not in self._barriers:
                self._barriers[group] = StartBarrier(self._ranks, self._new_incarnation)
            return self._barriers[group]

    def _new_incarnation(self) -> "LockstepIncarnation | MetIncarnation":
        return LockstepIncarnation(self._ranks, self.vllm_config, self.on_spawn)


@dataclass(eq=False)
class MachinesGroupLauncher(OverMachines, GroupLauncher):
    """Starts one machine's ranks of the only group of its node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._met: tuple[int, Sequence[str]] = (0, ())

    @property
    def ranks(self) -> int:
        return self._ranks

    @property
    def machines(self) -> int:
        return int(self.vllm_config.parallel_config.data_parallel_size) // self._ranks

    @property
    def layout(self) -> Mapping[str, str]:
        return {**super().layout, "--nnodes": str(self.machines)}

    def coordinate(self) -> "LockstepIncarnation":
        """Start the coordinator and the store of a meeting, on the first machine."""
        coordination = LockstepIncarnation(0, self.vllm_config, self.on_spawn)
        coordination.coordinate(copy.copy(self.vllm_config.parallel_config))
        return coordination

    def meet_in(self, meeting: int, port: int, coordinator: Sequence[str]) -> None:
        self._met = port, coordinator
        # All ranks of a group have the same seed, as in vLLM.
        self.first_incarnation = meeting
        self._starts.clear()

    def end_ranks(self) -> None:
        self._barrier(0).end_previous()

    def _index(self, replica_id: int) -> int:
        return int(self.vllm_config.parallel_config.data_parallel_rank) + replica_id

    def _new_incarnation(self) -> "MetIncarnation":
        return MetIncarnation(self._ranks, *self._met)


class LockstepIncarnation(GroupIncarnation):
    """Also owns vLLM's coordinator of the group's waves, and the store in which its ranks publish their ports.

    `port` is that of the store, `addresses` those of the coordinator, and `sentinel` readable when that has ended.
    """

    def __init__(self, ranks: int, vllm_config: Any, on_spawn: Callable[[int], None]) -> None:
        super().__init__(ranks)
        self._vllm_config = vllm_config
        self._on_spawn = on_spawn
        self._lock = threading.Lock()
        self._coordinator: Any = None
        self._store: Any = None
        self.port = 0

    @property
    def addresses(self) -> Sequence[str]:
        addresses: Sequence[str] = self._coordinator.get_engine_socket_addresses()
        return addresses

    @property
    def sentinel(self) -> int:
        return int(self._coordinator.proc.sentinel)

    def coordinate(self, parallel_config: Any) -> Any:
        """Set the store's port in `parallel_config` and return vLLM's `DPCoordinator`. Blocks while that starts."""
        with self._lock:
            if self._coordinator is None:
                self.raise_if_ended()
                self._store, self.port = _new_store(parallel_config.data_parallel_master_ip)
                self._coordinator = self._new_coordinator()
        parallel_config._coord_store_port = self.port
        return self._coordinator

    def _new_coordinator(self) -> Any:
        try:
            with SPAWN_LOCK:
                coordinator = _Coordinator(
                    self._vllm_config.parallel_config, logging_config=self._vllm_config.logging_config
                )
        except RuntimeError as error:
            raise ReplicaError(f"vLLM's coordinator of its group did not start: {error}") from error
        self.add(coordinator.proc, lambda: self._forget(coordinator))
        self._on_spawn(coordinator.proc.pid)
        return coordinator

    def _forget(self, coordinator: Any) -> None:
        coordinator.proc.join()
        self._store = None
        remove_ipc_files(*coordinator.get_engine_socket_addresses(), coordinator.get_stats_publish_address())


class MetIncarnation(GroupIncarnation):
    """That of a group over several machines, whose first one has coordinator and store."""

    def __init__(self, ranks: int, port: int, addresses: Sequence[str]) -> None:
        super().__init__(ranks)
        self._port = port
        self._addresses = addresses

    def coordinate(self, parallel_config: Any) -> Any:
        parallel_config._coord_store_port = self._port
        return _DistantCoordinator(self._addresses)


@dataclass(frozen=True)
class _DistantCoordinator:
    """What an engine's start needs of a `DPCoordinator`. Front ends of a fleet do not subscribe."""

    addresses: Sequence[str]
    proc: None = None

    def get_engine_socket_addresses(self) -> Sequence[str]:
        return self.addresses

    def get_stats_publish_address(self) -> None:
        return None


class _Coordinator(DPCoordinator):  # type: ignore[misc]
    """Constructed while `SPAWN_LOCK` is held."""

    def _wait_for_zmq_addrs(self, zmq_addr_pipe: Any) -> tuple[str, str, str]:
        # The last step of the constructor: the process is spawned, and takes seconds to import vLLM.
        SPAWN_LOCK.release()
        try:
            addresses: tuple[str, str, str] = super()._wait_for_zmq_addrs(zmq_addr_pipe)
            return addresses
        finally:
            SPAWN_LOCK.acquire()


def _new_store(host: str) -> tuple[Any, int]:
    """A store for the ranks of a group, and its port. Without our listener it would listen on all addresses."""
    listener = socket.create_server((host, 0))
    port: int = listener.getsockname()[1]
    store = create_tcp_store(host, port, listen_socket=listener, is_master=True, world_size=-1, wait_for_workers=False)
    return store, port


@dataclass(eq=False)
class RankProcess:
    """One rank; a `replicas.engine.engine_start.Process`. Killing it kills its group."""

    barrier: StartBarrier
    rank: int
    spawn: Callable[[], EngineProcess]
    parallel_config: Any

    def __post_init__(self) -> None:
        self._cancelled = threading.Event()
        self._incarnation: LockstepIncarnation | MetIncarnation | None = None
        self._engine: EngineProcess | None = None
        self._shut_down = False

    @property
    def pid(self) -> int:
        assert self._engine is not None, "the engine is spawned by `wait`"
        return self._engine.pid

    @property
    def sentinel(self) -> int:
        assert self._engine is not None, "the engine is spawned by `wait`"
        return self._engine.sentinel

    def exit_reason(self) -> str:
        return "" if self._engine is None else self._engine.exit_reason()

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None:
        """Wait for the other ranks, spawn the engine, and block until it has loaded the model with them.

        Raises ReplicaError if a rank of the group fails or does not start.
        """
        self._incarnation = incarnation = self.barrier.wait(self.rank, self._cancelled)
        with ExitStack() as undoing:
            undoing.callback(incarnation.end)
            self._engine = engine = self.spawn()
            undoing.callback(engine.abandon)
            if self._cancelled.is_set():
                incarnation.end()
            incarnation.add(engine.core)
            engine.wait(input_addr, output_addrs, incarnation.coordinate(self.parallel_config))
            undoing.pop_all()

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut the engine down once all ranks of its group are to shut down. Blocks; idempotent.

        Until then it computes with the others. `timeout` limits the wait for the other ranks (None: no limit), and then
        the wait for the engine (None: 15). With a timeout of 0 the whole group is killed.
        """
        if self._incarnation is not None:
            if timeout == 0:
                self._incarnation.end()
            else:
                self._incarnation.leave(self.rank, timeout)
        if self._engine is not None:
            self._engine.shutdown(timeout)
            self._shut_down = True
            if self._incarnation is not None:
                self._incarnation.close(self._engine.core)

    def kill(self) -> None:
        """Kill the group, or cancel this rank's wait for it. Does not block."""
        self.barrier.cancel(self._cancelled)
        # After `shutdown`, other ranks of the group may still be shutting down.
        if self._incarnation is not None and not self._shut_down:
            self._incarnation.end()
        if self._engine is not None:
            self._engine.kill()

    abandon = kill
