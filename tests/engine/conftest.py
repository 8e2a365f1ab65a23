"""Models and servers that the engine tests share."""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from vllm_omni_plugin.vllm_api.versions.differences import RUST_FRONT_END

from .api_servers import ApiServers
from .experts import make_experts
from .lora import make_lora
from .namespaces import Cable
from .nodes import Node, NodeFleet
from .server import FRONT_ENDS, IN_FLIGHT, RUST, START_S, WORKERS, Server, until
from .servers import Servers
from .suspended import PATIENT, keep_to_one_core
from .vision_model import make_vision_model

_TINY_MODEL = Path(__file__).parents[2] / "examples" / "cpu" / "tiny_model.py"


CLUSTERS = (
    *("plain", "fleet", "api_servers", "nodes", "vision_fleet", "speech", "disaggregated", "nodes_of_both_kinds"),
    *("group", "pooling_fleet", "refiner", "guarded", "movers"),
)
"""Fixtures that are servers, in the order in which lanes take them, the longest first."""
_OF_ONE_LANE = {"fleet": "plain", "api_servers": "plain"}
"""They are compared with it."""


# First: xdist puts the names of groups into those of tests at the same time.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs an engine. It comes first, and what shares servers in one lane."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            cluster = _cluster(item)
            lane = _OF_ONE_LANE.get(cluster, cluster)
            item.add_marker(pytest.mark.xdist_group(lane if _front_end(item) != RUST else f"{lane}-{RUST}"))
    items.sort(key=_turn)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked `both_front_ends` are also for servers with vLLM's Rust front end, if this vLLM has it."""
    marker = metafunc.definition.get_closest_marker("both_front_ends")
    if marker is not None and RUST_FRONT_END.applies:
        rust = pytest.param(RUST, marks=() if marker.kwargs.get("newest") else pytest.mark.long)
        metafunc.parametrize("front_end", ["python", rust], indirect=True, scope="session")


def _front_end(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("front_end", "python")) if callspec else "python"


def _cluster(item: pytest.Item) -> str:
    fixtures = getattr(item, "fixturenames", ())
    return max(set(CLUSTERS).intersection(fixtures), key=CLUSTERS.index, default=item.path.stem)


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("engine") is None:
        return len(CLUSTERS) + 1
    cluster = _cluster(item)
    return CLUSTERS.index(cluster) if cluster in CLUSTERS else len(CLUSTERS)


@pytest.fixture(scope="session")
def tiny_model_maker() -> ModuleType:
    """The script that makes the model of `make demo`."""
    spec = importlib.util.spec_from_file_location("tiny_model", _TINY_MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_model_maker: ModuleType) -> Path:
    """The model of `make demo`."""
    directory: Path = tiny_model_maker.make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return directory


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def servers(logs: Path) -> Iterator[Servers]:
    """Every server that more than one test talks to."""
    with Servers(logs) as running:
        yield running


@pytest.fixture(scope="module")
def make_room(servers: Servers) -> None:
    """Ends the shared servers, for a module with engines of its own."""
    servers.stop_all()


@pytest.fixture(scope="session")
def experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts without weights."""
    return make_experts(tiny_model, tmp_path_factory.mktemp("experts") / "model")


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    with Cable() as cable:
        yield cable


@pytest.fixture(scope="session")
def front_end(request: pytest.FixtureRequest) -> str:
    """The front end of servers: one of `FRONT_ENDS`, Python for tests that are not marked `both_front_ends`."""
    return str(getattr(request, "param", "python"))


@pytest.fixture
def fleet(servers: Servers, tiny_model: Path, front_end: str) -> Server:
    """A head with two local replicas, for tests that leave it as they found it."""
    environment = ALL_ROUTES | FRONT_ENDS[front_end]
    return servers.get(f"fleet-{front_end}", tiny_model, *TWO_REPLICAS, *FEATURES, engines=2, **environment)


@pytest.fixture
def plain(servers: Servers, tiny_model: Path, front_end: str) -> Server:
    """vLLM without any flag of ours, with the plugin installed."""
    # The default backend tries several, and answers with the error of the last one. A fleet has one.
    backend = ("--structured-outputs-config.backend", "xgrammar")
    environment = ALL_ROUTES | FRONT_ENDS[front_end]
    return servers.get(f"plain-{front_end}", tiny_model, *FEATURES, *backend, engines=1, **environment)


@pytest.fixture(scope="session")
def vision_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model", tiny_model)


def two_replicas(servers: Servers, name: str, model: Path, *flags: str, **environment: str) -> Server:
    """A head with two local replicas, both of which serve."""
    server = servers.get(name, model, *TWO_REPLICAS, *flags, engines=2, **environment)
    until(lambda: server.replicas_up() == 2, "both replicas serve", START_S)
    return server


@pytest.fixture
def vision_fleet(servers: Servers, vision_model: Path, tiny_model: Path, front_end: str) -> Server:
    """A head with two local replicas that serve before each test, with worker processes and few requests at once.

    vLLM's Rust front end does not know the model that sees, and serves another one.
    """
    model = tiny_model if front_end == RUST else vision_model
    flags = ("--max-num-seqs", str(RUNNING_EACH), "--max-model-len", "4096", "--omni-replica-wait", REPLICA_WAIT_S)
    environment = {**DEV_MODE, "VLLM_CPU_OMP_THREADS_BIND": "0|1", **FRONT_ENDS[front_end]}
    return two_replicas(servers, f"vision-{front_end}", model, *WORKERS, *flags, *PATIENT, **environment)


@pytest.fixture
def api_servers(servers: Servers, tiny_model: Path) -> Iterator[ApiServers]:
    """Two API servers and two local replicas; both serve before each test, and after it if it did not end them."""

    running: ApiServers = servers.keep("api-servers", partial(start_api_servers, tiny_model), engines=2)
    until(lambda: running.health() == 200 and running.replicas_up() == 2, "two replicas take requests", START_S)
    for engine in running.engines:
        keep_to_one_core(engine)
    until(lambda: all(map(psutil.pid_exists, running.pids.values())), "both API servers run", START_S)
    yield running
    if running.process.poll() is None:
        _wait_until_idle(running)
    else:
        servers.end("api-servers")


@pytest.fixture
def nodes(servers: Servers, tiny_model: Path, front_end: str) -> Iterator[NodeFleet]:
    """A head without engines and two headless nodes, all of them in service before each test and after it."""

    def start(log: Path) -> NodeFleet:
        environment = RUNTIME_LORA | FRONT_ENDS[front_end]
        return NodeFleet(tiny_model, log, nodes=2, flags=("--enable-lora",), environment=environment)

    running: NodeFleet = servers.keep(f"nodes-{front_end}", start, engines=2)
    running.wait_for_replicas(2)
    yield running
    running.wait_for_replicas(2)
    _wait_until_idle(running.head)


@pytest.fixture
def start_sim(nodes: NodeFleet) -> Iterator[Callable[..., Node]]:
    """Starts nodes with simulated engines for the head of `nodes`; see `NodeFleet.start_sim`."""
    started: list[Node] = []

    def start(*flags: str, **how: Any) -> Node:
        started.append(nodes.start_sim(*flags, **how))
        return started[-1]

    yield start
    for node in started:
        node.stop()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """For clients that ask at the same time."""
    with ThreadPoolExecutor(48) as threads:
        yield threads


@pytest.fixture(scope="session")
def admin_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with two keys, one of which is `ADMIN_KEY`."""
    path = tmp_path_factory.mktemp("keys") / "admin.keys"
    path.write_text(f"not-for-these-tests\n{ADMIN_KEY}\n")
    return path


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lora(tmp_path_factory.mktemp("adapter") / "lora", seed=1)


@pytest.fixture
def nodes_of_both_kinds(
    servers: Servers, tiny_model: Path, adapter: Path, admin_keys: Path, front_end: str
) -> NodeFleet:
    """One replica of the head's own, one behind a replica server, both with little memory, for a head that knows what
    they have cached and has a key for its operators."""

    def start(log: Path) -> NodeFleet:
        return NodeFleet(
            tiny_model,
            log,
            nodes=1,
            local=1,
            flags=(*SMALL_CACHE, "--enable-lora", "--scheduler-cls", "stalling_scheduler.StallingScheduler"),
            head_flags=(
                *KV_AWARE,
                *("--lora-modules", f"{ADAPTER}={adapter}"),
                *("--omni-admin-key-file", str(admin_keys)),
                *("--omni-stall-timeout", "10"),
            ),
            environment={
                **(RUNTIME_LORA | DEV_MODE | FRONT_ENDS[front_end]),
                "STALL_FILE": str(stall_file(tiny_model)),
            },
        )

    nodes: NodeFleet = servers.keep(f"kv-aware-{front_end}", start, engines=2)
    nodes.wait_for_replicas(2)
    return nodes


def stall_file(model: Path) -> Path:
    """The file that lets an engine of `nodes_of_both_kinds` stall, see `startup/stalling_scheduler.py`."""
    return model.with_name("stalled")


def _wait_until_idle(server: Server) -> None:
    until(lambda: set(server.by_replica(IN_FLIGHT).values()) == {0}, "nothing is in flight")


def start_api_servers(model: Path, log: Path) -> ApiServers:
    """Two API servers with admission and two local replicas, each on a core of its own."""
    # All that any of its processes leaves behind is in one folder. Its name is short for the sake of ipc sockets.
    scratch = tempfile.mkdtemp(prefix="api-")
    file = admission_file(model)
    file.write_text(ADMISSION)
    # What still runs is aborted at the end, as with vLLM alone.
    several = ("--api-server-count", "2", "--omni-drain-timeout", "0")
    flags = (*TWO_REPLICAS, *FEATURES, *several, "--omni-admission", str(file))
    # A connection that is to a certain process may wait for its turn.
    patient = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
    environment = {**ALL_ROUTES, **patient}
    return ApiServers(model, log, *flags, scratch=scratch, **environment).__enter__()


def admission_file(model: Path) -> Path:
    """The admission file of `api_servers`."""
    return model.with_name("admission.yaml")


ADMISSION = "classes:\n  - name: only\n"
"""Content of `admission_file` before each test and after it."""
BLOCK = 32
SMALL_CACHE = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", "60")
KV_AWARE = ("--omni-lb-policy", "kv-aware", "--enable-prompt-tokens-details")
ADAPTER = "storyteller"
ADMIN_KEY = "admin-key-of-these-tests"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
STEP_TOKENS = 1024
FEATURES = (
    # The one that models are served in, and on processors with AMX another kernel.
    *("--dtype", "bfloat16"),
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--enable-prompt-tokens-details",
    "--enable-lora",
    # Serves /inference/v1/generate.
    "--enable-scale-out",
    # So that a few long prompts are all that an engine is sent ahead.
    *("--max-num-batched-tokens", str(STEP_TOKENS)),
)
RUNNING_EACH = 2
"""Requests that an engine of `vision_fleet` runs at once."""
REPLICA_WAIT_S = "2"
"""Of `vision_fleet`: short, so that both are seen, waiting and waiting in vain."""
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""Serves the routes that pause engines, put them to sleep, and the like."""
RUNTIME_LORA = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
ALL_ROUTES = {**DEV_MODE, **RUNTIME_LORA, "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
"""Of the servers whose answers are compared."""
HEARTBEAT_TIMEOUT_S = 4.0
QUICK_HEARTBEATS = ("--omni-heartbeat-timeout", str(HEARTBEAT_TIMEOUT_S), "--omni-heartbeat-interval", "1")
TWO_REPLICAS = ("--omni-lb-policy", "least-queue-length", "--omni-dp-size-local", "2")
