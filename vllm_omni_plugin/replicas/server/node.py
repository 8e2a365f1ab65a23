"""The replicas of one headless process: run together, told together to leave, within what it may open."""

import asyncio
import errno
import resource
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import zmq

from vllm_omni_plugin.curve.descriptors import NONE_LEFT
from vllm_omni_plugin.errors import ConfigError, OmniError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.server.replica_server import ReplicaServer

logger = init_logger(__name__)

_OPEN_FILES = 65535
"""What vLLM sets for its API servers."""
_BESIDE_REPLICAS = 64
_BY_REPLICA = 130
_BY_HEAD = 20

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def raise_limits(replicas: int, heads: int = 1, more: int = 0) -> None:
    """Allow as many files and sockets as replicas need. Before the first socket of ZMQ's shared context is made.

    Args:
        replicas: how many this process will serve.
        heads: how many will share each of them, as far as is known.
        more: descriptors that each takes besides.

    Raises:
        ConfigError: they need more than the system allows. ZMQ ends a process that has no descriptor left, at any time.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _BESIDE_REPLICAS + replicas * (_BY_REPLICA + heads * _BY_HEAD + more)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{replicas} replicas need some {needed} open files, and this process may have {hard}: raise its limit "
            "(ulimit -Hn, or LimitNOFILE= of systemd), or run fewer replicas in it"
        )
    wanted = max(_OPEN_FILES, needed)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    raise_socket_limit(zmq.Context.instance())


def worded(error: Exception) -> Exception:
    """The same error, or in its place one that says what to do where no descriptor was left."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return OmniError(f"{error}: {NONE_LEFT}")
    return error


def raise_socket_limit(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Allow as many sockets as ZMQ can. Only before the first one is made.

    ZMQ's default is 1,023, and a replica that is served has some 37 in the shared context.
    """
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))


@asynccontextmanager
async def running_together(on_signal: Callable[[int], None]) -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks that run until all have ended, or until one fails: then the others are cancelled, and its error is raised.

    Args:
        on_signal: told of each SIGTERM and SIGINT meanwhile, which do nothing else.
    """
    loop = asyncio.get_running_loop()
    for signum in SIGNALS:
        loop.add_signal_handler(signum, on_signal, signum)
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as failures:
        raise worded(failures.exceptions[0]) from failures
    finally:
        for signum in SIGNALS:
            loop.remove_signal_handler(signum)


async def run_node(servers: Sequence[ReplicaServer], join_timeout: float, head: str) -> None:
    """Run replicas until all have left. The first SIGTERM or SIGINT drains them, the second makes them leave at once.

    Args:
        servers: the replicas, not started.
        join_timeout: seconds, after the start of its engine, in which each replica must reach the head for the first
            time; 0: no limit.
        head: the head's address, for messages.

    Raises:
        ConfigError: this process may not open as many files as they need.
        OmniError: a replica failed, or did not find the head in time. The others have left too.
    """
    raise_limits(len(servers))
    told_to_leave = False

    def on_signal(signum: int) -> None:
        nonlocal told_to_leave
        for server in servers:
            if told_to_leave:
                server.leave_now(f"its node was told twice to leave ({signal.Signals(signum).name})")
            else:
                server.drain()
        told_to_leave = True

    async with running_together(on_signal) as tasks:
        for server in servers:
            tasks.create_task(_run(server, join_timeout, head))


async def _run(server: ReplicaServer, join_timeout: float, head: str) -> None:
    """Run one replica, and give it up if it does not find the head in time."""
    running = asyncio.ensure_future(server.run())
    joining = asyncio.ensure_future(_join(server, join_timeout))
    try:
        await asyncio.wait({running, joining}, return_when=asyncio.FIRST_COMPLETED)
        if joining.done():
            try:
                joining.result()
            except TimeoutError:
                raise OmniError(
                    f"no head answered at {head} within {join_timeout:g} s of the engine's start; check "
                    "--omni-master-address, --omni-master-port and --omni-secret-file, or wait for the head with "
                    "--omni-join-timeout 0"
                ) from None
        await running
    finally:
        joining.cancel()
        running.cancel()
        await asyncio.wait({running, joining})


async def _join(server: ReplicaServer, join_timeout: float) -> None:
    await server.ready.wait()
    async with asyncio.timeout(join_timeout or None):
        await server.joined.wait()
