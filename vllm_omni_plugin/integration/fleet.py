"""Everything a head runs beside AsyncLLM, under one owner."""

import ipaddress
import time
from typing import Any

from vllm_omni_plugin.balancing import build_load_balancer_factory
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import OmniCoordClientForHub, OmniCoordinatorRuntime
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.integration.rules import bind_address
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.local_replicas import LocalReplicas
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.remote_replicas import RemoteReplicas
from vllm_omni_plugin.orchestrator.replica_list import ReplicaListWatcher
from vllm_omni_plugin.orchestrator.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.thread import OrchestratorThread
from vllm_omni_plugin.replicas.reaper import Reaper
from vllm_omni_plugin.vllm_api.cache_events import why_no_cache_events
from vllm_omni_plugin.vllm_api.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.fingerprint import fingerprint
from vllm_omni_plugin.vllm_api.launch import EngineLauncher, share_cores, spawn_only
from vllm_omni_plugin.vllm_api.moving import has_custom_logits_processors

logger = init_logger(__name__)

_STAGE = 0


class Fleet:
    """The coordinator's process, the follower of its list, and the orchestrator's thread with this node's replicas.

    Args:
        options: the head's.
        vllm_config: vLLM's configuration, the same for every replica.
        executor_class: vLLM's executor for local replicas.
        log_stats: whether engines report scheduler statistics.

    Attributes:
        orchestrator: balances over the replicas.
        coordinator: where replicas of other processes join, None in a fleet that nobody can join.

    Raises:
        ConfigError: the coordinator cannot listen where it is told to.
    """

    def __init__(self, options: OmniConfig, vllm_config: Any, executor_class: Any, log_stats: bool) -> None:
        self._options = options
        self._secrets = Secrets.from_file(options.secret_file) if options.secret_file else None
        self._api = EngineApi(custom_processors=has_custom_logits_processors(vllm_config.model_config))
        # Engines are started from a process with threads, at first and after every death; a fork of one may deadlock.
        spawn_only()
        share_cores(vllm_config, options.dp_size_local)
        self._fingerprint = fingerprint(vllm_config, _STAGE)
        self._reaper = Reaper()
        balancer = build_load_balancer_factory(options.lb_policy, options.lb_config)()
        pool = StagePool(_STAGE, balancer, policy=options.lb_policy)
        self._launcher = EngineLauncher(
            vllm_config, executor_class, log_stats, self._reaper.watch, report_cache=pool.wants_cache_events
        )
        if pool.wants_cache_events and (reason := why_no_cache_events(vllm_config)):
            logger.warning("Policy %s estimates what engines have cached: %s.", options.lb_policy, reason)
        self.orchestrator = Orchestrator(
            [pool], self._api, options.migration_limit, time.monotonic, replica_wait=options.replica_wait
        )
        self._thread = OrchestratorThread(
            self.orchestrator, self._local_replicas, self._remote_replicas if options.is_open else None
        )
        self.coordinator = self._start_coordinator() if options.is_open else None
        self._follower: OmniCoordClientForHub | None = None

    def start(self) -> list[bytes]:
        """Start the local replicas and begin to take others in. Blocks; returns the local ones' ready responses.

        Raises:
            ReplicaError: a local replica did not start. Nothing is left running.
        """
        try:
            ready_responses = self._thread.start()
            if self.coordinator is not None:
                watcher = ReplicaListWatcher(self.orchestrator.rpc_async_queue)
                self._follower = OmniCoordClientForHub(
                    self.coordinator.pub_address, watcher.update, secrets=self._secrets
                )
        except BaseException:
            self.close(0.0)
            raise
        return ready_responses

    def close(self, timeout: float | None = None) -> None:
        """End the local replicas, giving each `timeout` seconds (None: vLLM's default), and let others go. Idempotent.

        Replicas of other processes keep running, and join the next head.
        """
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()
        self._thread.close(timeout)
        if self.coordinator is not None:
            self.coordinator.close()
        self._reaper.close()

    def _start_coordinator(self) -> OmniCoordinatorRuntime:
        options = self._options
        assert options.master_port is not None
        address = bind_address(options, headless=False)
        if options.insecure:
            logger.warning(
                "--omni-insecure: everybody who reaches %s port %d can use and harm this fleet.",
                address,
                options.master_port,
            )
        coordinator = OmniCoordinatorRuntime(
            address, options.master_port, options.heartbeat_timeout, secret_file=options.secret_file
        )
        every = ipaddress.ip_address(address).is_unspecified
        found_at = "<an address of this machine>" if every else options.master_address
        logger.info("Replicas join with: --headless -oma %s -omp %d", found_at, options.master_port)
        return coordinator

    def _local_replicas(self) -> LocalReplicas:
        return LocalReplicas(
            self.orchestrator, _STAGE, self._options.dp_size_local, self._launcher, self._api, time.monotonic
        )

    def _remote_replicas(self) -> RemoteReplicas:
        return RemoteReplicas(
            self.orchestrator,
            self._api,
            {_STAGE: self._fingerprint},
            heartbeat_interval=self._options.heartbeat_interval,
            heartbeat_timeout=self._options.heartbeat_timeout,
            secrets=self._secrets,
        )
