"""Everything that a head runs besides AsyncLLM."""

import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from vllm_omni_plugin.admission import AdmissionConfig, load_admission
from vllm_omni_plugin.balancing import build_load_balancer_factory
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import OmniCoordClientForHead, OmniCoordinatorRuntime, ReplicaWork, generation_of
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages, StagePlan, own_numbers, stage_plans
from vllm_omni_plugin.integration.options import listening
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator import FleetControl, Orchestrator, OrchestratorThread, SessionListener, StagePool
from vllm_omni_plugin.orchestrator.attachment.local_replicas import LocalReplicas, LocalStage
from vllm_omni_plugin.orchestrator.attachment.remote_replicas import RemoteReplicas
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.front_end import FrontEnd, QueuedFrontEnd
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.orchestrator.pool.work_exchange import WorkExchange
from vllm_omni_plugin.orchestrator.pool.worker_ranks import WorkerRanks
from vllm_omni_plugin.replicas.engine.engine_keeper import Timing
from vllm_omni_plugin.replicas.engine.reaper import Reaper
from vllm_omni_plugin.replicas.engine.socket_folder import use_socket_folder
from vllm_omni_plugin.replicas.remote.remote_replica import AttachSettings
from vllm_omni_plugin.vllm_api.engine_messages.structured_outputs import fix_backend
from vllm_omni_plugin.vllm_api.launch.engine_identity import listen_for_transfers_at
from vllm_omni_plugin.vllm_api.launch.engine_launch import forbid_fork
from vllm_omni_plugin.vllm_api.launch.kv_event_settings import why_no_cache_events
from vllm_omni_plugin.vllm_api.vllm_stages.stage_api import StageApi
from vllm_omni_plugin.vllm_api.vllm_stages.stage_requests import VllmStageApi

logger = init_logger(__name__)


def start_coordinator(
    options: OmniConfig,
    plans: Sequence[StagePlan],
    address: str,
    port: int,
    first_replica_ids: Mapping[int, int] | None = None,
) -> OmniCoordinatorRuntime:
    """Start the coordinator process, and log how nodes and heads join, unless the port is 0. Raises ConfigError."""
    listening.warn_if_insecure(options, address)
    coordinator = OmniCoordinatorRuntime(
        address,
        port,
        options.heartbeat_timeout,
        secret_file=options.secret_file,
        first_replica_ids=first_replica_ids,
        reserved_numbers=sum(plan.replicas for plan in plans),
        fingerprints={plan.stage_id: plan.fingerprint for plan in plans},
    )
    if port:
        listening.log_join_command(options, address)
    return coordinator


class Fleet:
    """Owns the coordinator process, this head's session with it, and the orchestrator thread with the local replicas.

    A head that joins a fleet, as each of several API servers does, has a session with another process's coordinator and
    no local replicas. It has no `coordinator`, nor has a fleet that nothing can join. Raises ConfigError if a stage
    cannot be served as configured, or the coordinator cannot listen.
    """

    def __init__(
        self,
        options: OmniConfig,
        vllm_config: Any,
        executor_class: Any,
        log_stats: bool,
        make_front_end: Callable[[], FrontEnd] = QueuedFrontEnd,
    ) -> None:
        self._options = options = _with_secret(options)
        self._secrets = Secrets.from_file(options.secret_file) if options.secret_file else None
        # This process has threads, so a forked engine process could deadlock.
        forbid_fork()
        if not options.join:
            use_socket_folder()
            if options.is_open:
                listen_for_transfers_at(listening.engines_address(options))
        self._plans = stage_plans(options, vllm_config, executor_class, log_stats)
        self._fingerprints = {plan.stage_id: plan.fingerprint for plan in self._plans}
        for plan in self._plans:
            if plan.vllm_config is not None:
                fix_backend(plan.vllm_config)
        self.stages = FleetStages.of(self._plans)
        self._reaper = Reaper()
        self._exchange = WorkExchange(self._report_work) if options.is_open else None
        self._pools = [_pool(plan, self._exchange, options.admission is not None) for plan in self._plans]
        self._head_id = f"{socket.gethostname()}-{uuid.uuid4().hex}"
        front_end = make_front_end()
        self.orchestrator = self._make_orchestrator(front_end)
        current_client = self._current_client if options.is_open else None
        self.fleet_calls = FleetCalls(self.orchestrator, self._head_id, current_client)
        self._thread = self._make_thread()
        self.coordinator = self._start_coordinator() if options.is_open and not options.join else None
        # Held while the client is created: its thread may call back before `_client` is set.
        self._connecting = threading.Lock()
        self._client: OmniCoordClientForHead | None = None

    def start(self) -> list[list[bytes]]:
        """Start the local replicas, let others join, and return the local ready responses by stage. Blocks.

        Raises ReplicaError if a local replica does not start; then nothing is left running.
        """
        try:
            ready_responses = self._thread.start()
            if self._options.is_open:
                with self._connecting:
                    self._client = self._connect()
        except BaseException:
            self.close(0.0)
            raise
        return ready_responses

    @property
    def worker_ranks(self) -> WorkerRanks:
        """Of the workers that get weights."""
        pools, stages = self.orchestrator.stage_pools, self.stages.model_stages
        return WorkerRanks(
            [pools[stage] for stage in stages],
            {stage: self.stages.numbers[stage] for stage in stages},
            {stage: self.stages.configs[stage].parallel_config.world_size for stage in stages},
            self._options.is_open,
        )

    def wait_for_requests(self, timeout: float) -> float:
        return self._thread.wait_for_requests(timeout)

    def watch(self, pid: int) -> None:
        """Kill this child process if it outlives this process or `close`. Thread-safe."""
        self._reaper.watch(pid)

    def cancel_wait(self) -> None:
        self._thread.cancel_wait()

    def close(self, timeout: float | None = None) -> None:
        """End the local replicas, each within `timeout` seconds (None: 15). Idempotent.

        Replicas of other processes keep running, and join the next head.
        """
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._thread.close(timeout)
        if self.coordinator is not None:
            self.coordinator.close()
        self._reaper.close()

    def _make_orchestrator(self, front_end: FrontEnd) -> Orchestrator:
        options, pipeline = self._options, self.stages.pipeline
        apis = [plan.api for plan in self._plans]
        input_builder = None
        if pipeline is not None:
            reader = apis[self.stages.prompt_stage]
            assert isinstance(reader, VllmStageApi)
            input_builder = StageInputBuilder(pipeline, cast(list[StageApi], apis), reader.prompt_text)
        admission = AdmissionConfig() if options.tenant_header is not None else None
        if options.admission is not None:
            admission = load_admission(options.admission)
        rules = HeadRules(options.migration_limit, options.replica_wait, options.stall_timeout, admission)
        return Orchestrator(self._pools, apis, rules, time.monotonic, input_builder=input_builder, front_end=front_end)

    def _make_thread(self) -> OrchestratorThread:
        remote = self._remote_replicas() if self._options.is_open else None
        control = FleetControl(self.orchestrator, self.fleet_calls, remote, self._exchange)
        return OrchestratorThread(self.orchestrator, control, self._local_replicas(), remote)

    def _start_coordinator(self) -> OmniCoordinatorRuntime:
        options = self._options
        assert options.master_port is not None
        own_replicas = {plan.stage_id: plan.replicas for plan in self._plans}
        return start_coordinator(
            options, self._plans, listening.bind_address(options, headless=False), options.master_port, own_replicas
        )

    def _connect(self) -> OmniCoordClientForHead:
        address = (
            listening.coordinator_address(self._options)
            if self.coordinator is None
            else self.coordinator.router_address
        )
        return OmniCoordClientForHead(
            address,
            self._head_id,
            SessionListener(self.orchestrator.rpc_async_queue),
            generation=generation_of(self._fingerprints),
            secrets=self._secrets,
            heartbeat_interval=self._options.heartbeat_interval,
            on_unreachable=self._on_session,
        )

    def _on_session(self, problem: str) -> None:
        self.orchestrator.metrics.coordinator_connected = not problem
        if problem:
            logger.warning("No replica can join for now: %s. Attached ones go on serving; trying again.", problem)
        else:
            logger.info("This head has a session with the coordinator.")

    def _current_client(self) -> OmniCoordClientForHead | None:
        with self._connecting:
            return self._client

    def _report_work(self, work: Sequence[ReplicaWork], full: bool) -> None:
        # A new session begins with a full report, so nothing is lost before there is one.
        client = self._current_client()
        if client is not None:
            client.report_work(work, full=full)

    def _local_replicas(self) -> LocalReplicas:
        stages = [
            LocalStage(
                plan.stage_id,
                plan.replicas,
                plan.make_launcher(self._reaper.watch, report_cache=pool.wants_cache_events, numbers=numbers),
                plan.api,
            )
            for plan, pool, numbers in zip(self._plans, self._pools, own_numbers(self._plans), strict=True)
        ]
        timing = Timing(self._options.heartbeat_interval, self._options.heartbeat_timeout, time.monotonic)
        return LocalReplicas(self.orchestrator, stages, timing)

    def _remote_replicas(self) -> RemoteReplicas:
        settings = AttachSettings(
            codecs={plan.stage_id: plan.api for plan in self._plans},
            head_id=self._head_id,
            fingerprints=self._fingerprints,
            heartbeat_interval=self._options.heartbeat_interval,
            heartbeat_timeout=self._options.heartbeat_timeout,
            lease_timeout=self._options.lease_timeout,
            secrets=self._secrets,
            max_message_bytes=self._options.max_message_bytes,
        )
        return RemoteReplicas(self.orchestrator, self.fleet_calls, settings)


def _with_secret(options: OmniConfig) -> OmniConfig:
    if not options.is_open:
        return options
    try:
        return listening.with_secret(options, listening.bind_address(options, headless=False))
    except ConfigError:
        if not options.join:
            raise
        # The name of the head to join may not resolve until that head is there. A name of loopback would resolve.
        return options


def _pool(plan: StagePlan, exchange: WorkExchange | None, admits: bool) -> StagePool:
    """A stage's pool: requests wait at the head only with admission control and a vLLM engine."""
    balancer = build_load_balancer_factory(plan.policy, plan.policy_config)()
    binds_late = bool(getattr(balancer, "binds_late", False))
    # Late binding alone gains too little; but admission control can only order
    # requests that wait at the head. The limits of a Python stage are not known.
    waits = plan.vllm_config is not None and admits
    traits = PoolTraits(plan.lockstep, exchange, waits_for_room=waits, any_replica=binds_late)
    pool = StagePool(plan.stage_id, balancer, policy=plan.policy, traits=traits)
    if plan.vllm_config is not None and pool.wants_cache_events and (reason := why_no_cache_events(plan.vllm_config)):
        logger.warning("Policy %s of stage %s estimates what engines have cached: %s.", plan.policy, plan.name, reason)
    return pool
