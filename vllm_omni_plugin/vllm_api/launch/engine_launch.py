"""Starting an engine process with vLLM's own process manager and start-up handshake."""

import copy
import os
import select
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq
from vllm import envs
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.utils.numa_utils import get_auto_numa_nodes
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM, startup_omp_num_threads
from vllm.v1.engine.utils import (
    CoreEngine,
    CoreEngineLaunch,
    CoreEngineProcManager,
    EngineZmqAddresses,
    get_engine_process_shutdown_timeout,
    set_assigned_physical_gpu_ids_for_dp_rank,
    wait_for_engine_startup,
)

from vllm_omni_plugin.errors import ConfigError, ReplicaError
from vllm_omni_plugin.vllm_api.launch.engine_identity import require_free_ports, set_identity
from vllm_omni_plugin.vllm_api.launch.fleet_engine import ExitNote, FleetExecutor, fleet_executor, mark_as_fleet_engine
from vllm_omni_plugin.vllm_api.launch.kv_event_settings import remove_event_sockets, turn_on_cache_events
from vllm_omni_plugin.vllm_api.launch.leftovers import kill_marked, mapped_memory, remove_memory
from vllm_omni_plugin.vllm_api.launch.spawning import (
    EXIT_TIMEOUT_S,
    SPAWN_LOCK,
    NodeShare,
    describe_exit,
    remove_ipc_files,
)

_DEATH_S = 5.0
"""Limit of the wait for a killed engine, which may be stuck in the kernel."""

_THREADS = "OMP_NUM_THREADS"


def replica_config(vllm_config: Any, rank: int) -> Any:
    """Copy the configuration for one engine of this node: rank i uses device block i, as in vLLM's DP mode."""
    config = copy.deepcopy(vllm_config)
    parallel = config.parallel_config
    user_devices = parallel.assigned_physical_gpu_ids
    parallel.data_parallel_rank_local = rank
    if not (current_platform.is_cuda_alike() or current_platform.is_xpu() or current_platform.is_cpu()):
        set_assigned_physical_gpu_ids_for_dp_rank(config, rank, user_devices)
    return config


def forbid_fork() -> None:
    """Make vLLM spawn its engines and workers instead of forking them."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def divide_cores(vllm_configs: Iterable[Any], engines: int) -> None:
    """Make each CPU engine bind its threads to cores of its own, unless the user has bound them.

    vLLM binds the threads of every independent rank to the same NUMA node. `VLLM_CPU_SIM_MULTI_NUMA` makes it divide
    the cores by the number of engines instead. The configurations are those of all engines of this node.
    """
    if not current_platform.is_cpu() or engines < 2 or envs.VLLM_CPU_OMP_THREADS_BIND != "auto":
        return
    vllm_configs = list(vllm_configs)
    for config in vllm_configs:
        # vLLM divides by this number. It was set before the ranks of each stage were known.
        config.parallel_config._api_process_count = engines
    workers = max(config.parallel_config.local_world_size for config in vllm_configs)
    if len(os.sched_getaffinity(0)) >= engines * workers:
        os.environ.setdefault("VLLM_CPU_SIM_MULTI_NUMA", "1")


@contextmanager
def _divide_loading(config: Any, engines: int) -> Iterator[None]:
    """Limit the threads with which a process that is spawned meanwhile loads weights to its share of the cores.

    vLLM does this for engines that it spawns together. A limit of the user's is left.
    """
    if current_platform.is_cpu() or engines < 2 or _THREADS in os.environ:
        yield
        return
    threads = startup_omp_num_threads(engines * config.parallel_config.local_world_size)
    # With the second one, vLLM drops the limit after the start.
    limit = {_THREADS: str(threads), OMP_NUM_THREADS_SET_BY_VLLM: "1"}
    os.environ.update(limit)
    try:
        yield
    finally:
        for name in limit:
            del os.environ[name]


def assign_devices(vllm_config: Any, first: int, replicas: int) -> int:
    """Assign the devices after the `first` of the user's (or all) to the replicas; returns their number, 0 on a CPU.

    Raises ConfigError if the node has too few.
    """
    if current_platform.is_cpu():
        return 0
    parallel = vllm_config.parallel_config
    # Those on this machine.
    world_size: int = parallel.local_world_size
    end = first + world_size * replicas
    chosen = parallel.assigned_physical_gpu_ids
    try:
        # By index: a slice beyond the end would be too short without an error.
        own = [
            current_platform.device_id_to_physical_device_id(index) if chosen is None else chosen[index]
            for index in range(first, end)
        ]
    except IndexError:
        raise ConfigError(
            f"{replicas} replicas of {world_size} devices need devices {first} to {end - 1}, and this node has fewer: "
            "lower --omni-dp-size-local (in a pipeline's file, replicas) or the parallel sizes"
        ) from None
    parallel.assigned_physical_gpu_ids = own
    if parallel.numa_bind:
        # vLLM counts these from the first device of the engines.
        nodes, cpus = parallel.numa_bind_nodes or get_auto_numa_nodes(), parallel.numa_bind_cpus
        parallel.numa_bind_nodes = _of_devices("--numa-bind-nodes", nodes, first, end)
        parallel.numa_bind_cpus = _of_devices("--numa-bind-cpus", cpus, first, end)
    return end - first


def _of_devices(flag: str, values: Sequence[Any] | None, first: int, end: int) -> Sequence[Any] | None:
    if values is None:
        return None
    if len(values) < end:
        raise ConfigError(
            f"argument {flag}: it has {len(values)} entries, and must have one for each device up to {end - 1}"
        )
    return values[first:end]


@dataclass(eq=False)
class EngineProcess:
    """An engine core process and its workers. Any thread may shut it down at any time.

    `has_workers`: the core starts its workers on this machine.
    """

    manager: CoreEngineProcManager
    config: Any
    exit_note: ExitNote
    handshake: "_Handshake"
    index: int
    has_workers: bool = False

    def __post_init__(self) -> None:
        self._memory: set[str] = set()
        # Readable once the engine core has exited. The sentinel of multiprocessing is readable before the exit code is
        # available.
        self.sentinel = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self.sentinel)

    @property
    def core(self) -> Any:
        return self.manager.processes[0]

    @property
    def pid(self) -> int:
        return int(self.core.pid)

    def exit_reason(self) -> str:
        note, code = self.exit_note.read(), self.core.exitcode
        return note or ("" if code is None else f"it {describe_exit(code)}")

    def shutdown(self, timeout: float | None = None) -> None:
        """Ask the engine to exit, wait `timeout` seconds (None: 15), then kill it. Blocks until it has ended.

        On ROCm an engine gets vLLM's time to free its memory also with a timeout of 0.
        """
        wait_s = EXIT_TIMEOUT_S if timeout is None else get_engine_process_shutdown_timeout(0, timeout)
        self.manager.shutdown(timeout=wait_s)
        # The system needs time to end a killed process, whose devices and ports are in use until then.
        select.select([self.sentinel], [], [], _DEATH_S)
        if self.has_workers:
            self._end_workers()
        remove_event_sockets(self.config)

    def kill(self) -> None:
        """Kill the engine and its workers. Does not block."""
        for process in self.manager.processes:
            if process.is_alive():
                process.kill()
        if self.has_workers:
            # Also if the core has ended by itself, as one that was killed while it loaded.
            threading.Thread(target=self._end_workers, name="omni-engine-end", daemon=True).start()
        remove_event_sockets(self.config)

    def _end_workers(self) -> None:
        """Kill workers that a crashed core has left, and remove their shared memory."""
        # A core that has returned has ended them, and the search reads the environment of every process here.
        if self.core.exitcode != 0:
            remove_memory(self._memory | kill_marked(str(self.exit_note.path)))

    def abandon(self) -> None:
        """Kill an engine that nobody will wait for. Not while `wait` runs; that returns when the engine is killed."""
        self.kill()
        self.handshake.close()

    def wait(self, input_addr: str, output_addrs: Sequence[str], coordinator: Any = None) -> None:
        """Run vLLM's start-up handshake: send the engine its addresses, and block until it has loaded the model.

        A rank of a lockstep group needs vLLM's `DPCoordinator`. Raises ReplicaError if the engine fails.
        """
        addresses = EngineZmqAddresses(inputs=[input_addr], outputs=list(output_addrs))
        # Each rank has a handshake of its own, in which it is the only local rank.
        parallel = copy.copy(self.config.parallel_config)
        parallel.data_parallel_size_local = 1
        # vLLM tells the store's port only where the first rank may be, and this is the start of one engine.
        parallel.data_parallel_rank = 0
        if coordinator is not None:
            addresses.coordinator_input, addresses.coordinator_output = coordinator.get_engine_socket_addresses()
            addresses.frontend_stats_publish_address = coordinator.get_stats_publish_address()
        launch = CoreEngineLaunch(
            engine_manager=self.manager, coordinator=coordinator, addresses=addresses, tensor_queue=None
        )
        try:
            wait_for_engine_startup(
                self.handshake.socket,
                [CoreEngine(index=self.index, local=True)],
                parallel,
                coordinator is not None,
                self.config.cache_config,
                launch,
            )
            self._memory = mapped_memory(self.pid)
        except RuntimeError as error:
            raise ReplicaError(f"engine {self.index} did not start: {error}") from error
        finally:
            self.handshake.close()


@dataclass(eq=False)
class EngineLauncher:
    """Starts the engines of this node's replicas, all with the same configuration.

    `on_spawn` gets the id of each new process, on the thread that spawns it. `numbers` are those of the replicas in the
    fleet, by replica id. Each start of a replica has the next incarnation, see `set_identity`. An engine must send its
    ready response within `ready_timeout` seconds of vLLM's handshake.
    """

    vllm_config: Any
    executor_class: Any
    log_stats: bool
    on_spawn: Callable[[int], None]
    numbers: Sequence[int]
    report_cache: bool = False
    share: NodeShare = field(default_factory=NodeShare)
    first_incarnation: int = 0
    ready_timeout: float = envs.VLLM_ENGINE_READY_TIMEOUT_S
    ready_timeout_variable: str = "VLLM_ENGINE_READY_TIMEOUT_S"
    _starts: Counter[int] = field(default_factory=Counter, init=False)

    def identity(self, replica_id: int) -> bytes:
        return bytes(CoreEngine(index=self._index(replica_id)).identity)

    def turn(self, replica_id: int) -> AbstractAsyncContextManager[None]:
        """Held while the engine starts on devices that the user gave, perhaps to another stage, too."""
        parallel = self.vllm_config.parallel_config
        workers = parallel.local_world_size
        first = replica_id * workers
        return self.share.turns.turn((parallel.assigned_physical_gpu_ids or ())[first : first + workers])

    def start(self, replica_id: int) -> EngineProcess:
        # Cores are shared by all engines of the node; devices were assigned to this configuration.
        rank = self.share.first_engine + replica_id if current_platform.is_cpu() else replica_id
        config = replica_config(self.vllm_config, rank)
        self._set_identity(config, replica_id)
        if self.report_cache:
            turn_on_cache_events(config)
        return self._spawn(config, self._index(replica_id), rank)

    def _spawn(self, config: Any, index: int, rank: int) -> EngineProcess:
        return spawn_engine(
            config,
            self.executor_class,
            self.log_stats,
            engine=index,
            rank=rank,
            on_spawn=self.on_spawn,
            engines=self.share.engines,
        )

    def _set_identity(self, config: Any, replica_id: int) -> None:
        require_free_ports(config, self.numbers[replica_id])
        set_identity(config, self.numbers[replica_id], self.first_incarnation + self._starts[replica_id])
        self._starts[replica_id] += 1

    def _index(self, replica_id: int) -> int:
        # For vLLM, a mixture-of-experts engine with an index above 0 is a rank of a lockstep group.
        return 0 if self.vllm_config.model_config.is_moe else self.numbers[replica_id]


def spawn_engine(
    config: Any,
    executor_class: Any,
    log_stats: bool,
    *,
    engine: int,
    rank: int,
    on_spawn: Callable[[int], None],
    engines: int = 1,
) -> EngineProcess:
    """Spawn the engine with the index `engine` on device or core block `rank`. Blocks until it has its configuration.

    `config` must belong to this engine alone; the other arguments are those of `EngineLauncher`.
    """
    # With 0, an engine that gets SIGINT or SIGTERM aborts its requests; we let them finish or move.
    config.shutdown_timeout = config.shutdown_timeout or 1
    exit_note, handshake = ExitNote(), _Handshake()
    with ExitStack() as undo:
        undo.callback(handshake.close)
        own_executor_class = fleet_executor(executor_class)
        with SPAWN_LOCK, mark_as_fleet_engine(exit_note), _divide_loading(config, engines):
            manager = CoreEngineProcManager(
                local_engine_count=1,
                start_index=engine,
                local_start_index=rank,
                vllm_config=config,
                local_client=True,
                handshake_address=handshake.address,
                executor_class=own_executor_class,
                log_stats=log_stats,
            )
        process = EngineProcess(manager, config, exit_note, handshake, engine, own_executor_class is FleetExecutor)
        undo.callback(process.kill)
        on_spawn(process.pid)
        undo.pop_all()
    return process


class _Handshake:
    def __init__(self) -> None:
        self.address: str = get_open_zmq_ipc_path()
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.address)

    def close(self) -> None:
        self.socket.close()
        remove_ipc_files(self.address)
