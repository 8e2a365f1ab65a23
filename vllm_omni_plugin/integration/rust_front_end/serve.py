"""`VLLM_USE_RUST_FRONTEND=1 vllm serve` with our flags: one process with the fleet, and the front end as its child.

The main thread's loop has signals, the operator's HTTP server and the front end's process. The orchestrator's thread
has the requests: it reads the front end's sockets itself.
"""

import argparse
import asyncio
import copy
import gc
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.entrypoints.launchers.api_server.entry import setup_server
from vllm.entrypoints.launchers.launcher import create_server_socket
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor import Executor

from vllm_omni_plugin.admin.http_admission import tenant_headers
from vllm_omni_plugin.admin.operator_actions import DRAINING, HeadDrain
from vllm_omni_plugin.config import FLAGS, OmniConfig
from vllm_omni_plugin.errors import SHUTTING_DOWN, OmniError
from vllm_omni_plugin.integration.core_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.integration.fleet_setup.fleet import Fleet
from vllm_omni_plugin.integration.options.exit_status import exit_status_of
from vllm_omni_plugin.integration.options.listening import listen_for_clients, not_bindable
from vllm_omni_plugin.integration.rust_front_end.admin_server import AdminServer
from vllm_omni_plugin.integration.rust_front_end.client_terms import terms_reader
from vllm_omni_plugin.integration.rust_front_end.front_end_link import FrontEndLink, FrontEndRules
from vllm_omni_plugin.integration.rust_front_end.process import ListeningSockets, RustFrontEnd
from vllm_omni_plugin.integration.rust_front_end.replica_statistics import FleetReports
from vllm_omni_plugin.integration.rust_front_end.unsupported import refuse_unsupported_stages
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool.pool_member import engine_index
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ReplicaJoined, ReplicaLeft
from vllm_omni_plugin.replicas.replica_server.node import SIGNALS
from vllm_omni_plugin.vllm_api.codecs.front_end_codec import as_only_engine
from vllm_omni_plugin.vllm_api.engine_messages.ready import apply_ready_responses
from vllm_omni_plugin.vllm_api.vllm_stages.stage_arguments import read_engine_args

logger = init_logger(__name__)

_GRACE_S = 10.0
"""Seconds that the front end may take to end, in addition to the time for requests."""
_BACKLOG = 2048
_WAITING_NOTICE_S = 10.0
_FAILED = "the orchestrator has failed; the log says why"


def serve_behind_rust(args: argparse.Namespace, options: OmniConfig) -> int:
    return exit_status_of(partial(_serve, args, options))


def _serve(args: argparse.Namespace, options: OmniConfig, resources: ExitStack) -> None:
    listening = listen(args, resources)
    engine_args = read_engine_args(args)
    vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    fleet = Fleet(
        options,
        vllm_config,
        Executor.get_class(vllm_config),
        not engine_args.disable_log_stats,
        make_front_end=FrontEndLink,
    )
    resources.callback(fleet.close, 0.0)
    args.shutdown_timeout = engine_args.shutdown_timeout
    server = Server(fleet, args, options, listening, vllm_config)
    # uvloop, which the orchestrator's thread has, keeps SIGCHLD for itself.
    with asyncio.Runner() as runner:
        runner.run(server.run())


class Server:
    """Runs everything until a signal ends it. Lives on the main thread's loop."""

    def __init__(
        self, fleet: Fleet, args: argparse.Namespace, options: OmniConfig, listening: ListeningSockets, vllm_config: Any
    ) -> None:
        self._fleet = fleet
        self._timeout: int = args.shutdown_timeout
        link = fleet.orchestrator.front_end
        assert isinstance(link, FrontEndLink)
        self._link = link
        self.drain = HeadDrain(fleet.orchestrator.events)
        self._serves = self._ending = self._hurries = self._closing = False
        self._listening = listening
        binary = envs.VLLM_RUST_FRONTEND_PATH
        assert binary is not None
        self._front_end = RustFrontEnd(
            binary,
            front_end_args(args),
            listening,
            link,
            watch=fleet.watch,
            probe_interval=options.heartbeat_interval,
            probe_timeout=options.heartbeat_timeout,
        )
        self._admin = AdminServer(
            fleet,
            args,
            options,
            vllm_config,
            drain=self.drain,
            is_starting=lambda: not self._serves,
            is_ending=lambda: self._ending,
            adapters=lambda: link.adapters.in_fleet,
        )
        self._reports = FleetReports(self._admin.statistics)
        self._vllm_config = vllm_config
        # `apply_ready_responses` adds numbers of KV blocks up, so it is called once.
        self._configured = False
        read_terms = terms_reader(tenant_headers(options.tenant_header, options.admission))
        self._rules = FrontEndRules(
            self._refuse_new,
            read_terms,
            self._reports.keep,
            self._replica_changed,
            self._front_end.adapters_changed,
            watermarks=vllm_config.watermark_config is not None,
        )

    async def run(self) -> None:
        """Returns after a signal; raises OmniError if the fleet or the front end cannot start, or the fleet fails."""
        loop = asyncio.get_running_loop()
        for signum in SIGNALS:
            loop.add_signal_handler(signum, self.on_signal, signum)
        try:
            await self._admin.start()
            await self._run()
        finally:
            # A failure, too: requests are not waited for any more.
            self._ending = True
            await self._front_end.close()
            await self._admin.close()
            self._closing = True
            await asyncio.to_thread(self._fleet.close, None if self._serves and not self._hurries else 0.0)
            # Not before: without a handler, a further signal would kill this process, which leaves its files.
            for signum in SIGNALS:
                loop.remove_signal_handler(signum)
            # Else libraries complain of what is left when the process ends.
            gc.unfreeze()

    async def _run(self) -> None:
        """Start engines and front end side by side; connections are accepted once both are ready."""
        stages = self._fleet.stages
        refuse_unsupported_stages(stages)
        calls = UtilityCallClient(self._fleet.orchestrator, stages, self._fleet.worker_ranks)
        self._link.bind(self._fleet.orchestrator.request_states, calls, self._rules)
        # While engines load, so that it loads its tokenizer meanwhile, and its complaints come early.
        preparing = asyncio.create_task(self._front_end.prepare(), name="omni-front-end-start")
        starting = asyncio.create_task(self._until_ready(), name="omni-fleet-start")
        try:
            await asyncio.wait((preparing, starting), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                # It has ended by itself, or a signal came.
                preparing.result()
                return
            ready_response = starting.result()
        finally:
            for task in (preparing, starting):
                task.cancel()
            await asyncio.wait((preparing, starting))
        if ready_response is not None and not self._ending:
            self._listen()
            self._serves = True
            # As AsyncLLM: a full collection need not look at what lives as long as the server.
            gc.collect()
            gc.freeze()
            await self._serve(ready_response)

    def _listen(self) -> None:
        try:
            self._listening.http.listen(_BACKLOG)
        except OSError as error:
            # While the port was only bound, another process could take it.
            host, port = self._listening.http.getsockname()[:2]
            raise not_bindable("--port", f"{host} port {port}", error) from error

    async def _until_ready(self) -> bytes | None:
        """Start the fleet; returns what the front end shall know of its engine, or None if a signal came first."""
        try:
            ready_responses = await asyncio.to_thread(self._fleet.start)
            own = ready_responses[self._fleet.stages.prompt_stage]
            if own:
                self._configured = True
                apply_ready_responses(self._vllm_config, own)
            for pool in self._fleet.orchestrator.stage_pools:
                for member in pool.members:
                    # Also one that has not started yet: it is tried again. Of others the orchestrator tells.
                    if not member.remote:
                        self._admin.statistics.joined(member.engine_index)
            return as_only_engine(own or [await self._first_to_join()])
        except OmniError:
            if self._ending:
                return None
            raise

    async def _first_to_join(self) -> bytes:
        first, failed = asyncio.wrap_future(self._link.first_ready_response), asyncio.wrap_future(self._link.ended)
        while not first.done():
            await asyncio.wait((first, failed), timeout=_WAITING_NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise OmniError(_FAILED)
            if not first.done():
                logger.info("Waiting until a replica serves; nodes join with vllm serve --headless.")
        return first.result()

    async def _serve(self, ready_response: bytes) -> None:
        failed = asyncio.wrap_future(self._link.ended)
        serving = asyncio.create_task(self._front_end.run(ready_response), name="omni-front-end")
        await asyncio.wait((serving, failed), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            serving.cancel()
            await asyncio.wait((serving,))
            raise OmniError(_FAILED)
        serving.result()

    def _replica_changed(self, change: ReplicaJoined | ReplicaLeft) -> None:
        index = engine_index(change.stage_id, change.replica_id)
        if isinstance(change, ReplicaLeft):
            self._reports.left(index)
            return
        if change.stage_id == self._fleet.stages.prompt_stage and not self._configured:
            self._configured = True
            apply_ready_responses(self._vllm_config, [change.ready_response])
        self._admin.statistics.joined(index)

    def on_signal(self, signum: int) -> None:
        """The first signal lets requests finish, for the drain timeout; a second one ends all at once.

        When engines have been told to end, signals change nothing.
        """
        name = signal.Signals(signum).name
        if self._closing:
            logger.info("%s: engines are ending.", name)
            return
        if self._ending:
            logger.info("%s while shutting down: ending at once.", name)
            self._hurries = True
            self._front_end.kill()
            self._fleet.cancel_wait()
            return
        self._ending = True
        logger.info("Shutting down: requests in flight have %d s; a second signal aborts them.", self._timeout)
        self._front_end.stop()
        loop = asyncio.get_running_loop()
        loop.call_later(self._timeout + _GRACE_S, self._front_end.kill)
        if self._serves:
            # Ctrl-C and some service managers signal engines too. They then end once they are idle, and stay ended.
            loop.run_in_executor(None, self._fleet.wait_for_requests, self._timeout)
        else:
            loop.run_in_executor(None, self._fleet.close, 0.0)

    def _refuse_new(self) -> str:
        """As `FrontEndRules.why_closed`; counts what is refused."""
        reason = SHUTTING_DOWN if self._ending else DRAINING if self.drain.active else ""
        self._fleet.orchestrator.metrics.requests_failed_before_accept += bool(reason)
        return reason


def listen(args: argparse.Namespace, resources: ExitStack) -> ListeningSockets:
    """Bind the sockets for clients, which `resources` closes; see `listen_for_clients`."""
    _, http = listen_for_clients(setup_server, args, reuse_port=False)
    resources.callback(http.close)
    if args.uds:
        # While the file exists, nobody can listen there.
        resources.callback(Path(args.uds).unlink, missing_ok=True)
    grpc = None
    if args.grpc_port is not None:
        # As vLLM does: beside HTTP, or on loopback if HTTP has a unix socket.
        host = "127.0.0.1" if args.uds else args.host or ""
        try:
            grpc = create_server_socket((host, args.grpc_port), reuse_port=False)
        except OSError as error:
            raise not_bindable("--grpc-port", f"{host or '0.0.0.0'} port {args.grpc_port}", error) from error
        resources.callback(grpc.close)
    return ListeningSockets(http, grpc)


def front_end_args(args: argparse.Namespace) -> argparse.Namespace:
    """The command line for the front end, which knows neither our flags nor ranks."""
    own = copy.copy(args)
    for flag in FLAGS:
        setattr(own, flag.destination, None)
    own.data_parallel_size = 1
    own.data_parallel_size_local = None
    return own
