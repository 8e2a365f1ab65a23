"""What a process with several API servers does while it runs, and the order in which it ends."""

import asyncio
import signal
from collections.abc import Sequence

from vllm_omni_plugin.integration.processes.api_servers import ApiServers
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.server.node import running_together
from vllm_omni_plugin.replicas.server.replica_server import ReplicaServer

logger = init_logger(__name__)

_GRACE_S = 10.0
"""Seconds beyond the time for requests that an API server may take to end."""


async def supervise(api_servers: ApiServers, replicas: Sequence[ReplicaServer], shutdown_timeout: float) -> None:
    """Run API servers and replicas until SIGTERM or SIGINT: then the former end, and after them the latter.

    A second signal ends both at once. A replica that leaves the fleet ends by itself, and nothing else with it.

    Args:
        api_servers: not started.
        replicas: not started.
        shutdown_timeout: seconds that requests in flight have to finish.

    Raises:
        OmniError: a replica or an API server could not be started the first time. Nothing is left running.
    """
    told = asyncio.Event()

    def on_signal(signum: int) -> None:
        if told.is_set():
            logger.info("%s again: ending at once.", signal.Signals(signum).name)
            api_servers.kill()
        told.set()

    async with running_together(on_signal) as tasks:
        tasks.create_task(api_servers.run())
        for replica in replicas:
            tasks.create_task(replica.run())
        await told.wait()
        logger.info("Ending: requests in flight have %g s.", shutdown_timeout)
        # Ctrl-C and some service managers tell engines, too, which then end once they have nothing to do.
        for replica in replicas:
            replica.restart_no_more()
        await api_servers.stop(shutdown_timeout + _GRACE_S)
        for replica in replicas:
            replica.leave_now("its head was told to end")
