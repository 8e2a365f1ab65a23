"""The replicas of one headless process: run together, told together to leave."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.replicas.server.descriptor_limits import raise_limits, worded
from vllm_omni_plugin.replicas.server.replica_server import ReplicaServer

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def task_group_with_signals(on_signal: Callable[[int], None]) -> AsyncIterator[asyncio.TaskGroup]:
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
                server.stop_now(f"its node was told twice to leave ({signal.Signals(signum).name})")
            else:
                server.drain()
        told_to_leave = True

    async with task_group_with_signals(on_signal) as tasks:
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
