"""Utility calls (LoRA, sleep, caches, ...): vLLM's client makes them, and here they go to all replicas concerned."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_plugin.admin.operator_calls import note_refusal
from vllm_omni_plugin.coordinator.protocol.call_effects import ABORT_CLIENT_REQUESTS, FORGET_LORA, HEAD_CALLS
from vllm_omni_plugin.errors import CoordinatorUnavailableError, NoReplicaError, OmniError, RanksUnknownError
from vllm_omni_plugin.integration.core_client.request_failures import to_http
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.worker_ranks import WorkerRanks
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CallReplicas
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, result_of
from vllm_omni_plugin.vllm_api.codecs.message_filter import ALLOWED_CALLS
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter, adapter_of

STAGES_OF_METHOD: dict[str, Callable[[FleetStages], tuple[int, ...]]] = {
    **dict.fromkeys(("is_scheduler_paused", "is_sleeping"), lambda stages: (stages.prompt_stage,)),
    **dict.fromkeys(
        (
            "collective_rpc",
            "compute_weight_checksums",
            "get_supported_tasks",
            "get_weight_version",
            "set_weight_version",
        ),
        lambda stages: stages.model_stages,
    ),
    **dict.fromkeys(
        ("add_lora", FORGET_LORA, "list_loras", "pin_lora", "remove_lora"), lambda stages: stages.adapter_stages
    ),
}
"""For engine methods that do not concern all stages: the stages that they concern."""

COMBINE_ANSWERS: dict[str, Callable[[list[Any]], Any]] = {
    "add_lora": all,
    # One result for each worker of an engine.
    "collective_rpc": lambda answers: [result for answer in answers for result in answer or ()],
    "list_loras": lambda answers: set.intersection(*map(set, answers)),
    "pin_lora": all,
    "remove_lora": any,
}
"""How the results of replicas become the one that vLLM's client returns. For other methods: the first result."""

_IDS_PER_CALL = 128


class UnknownCallError(OmniError, AttributeError, NotImplementedError):
    """vLLM calls a method that this version of the plugin does not know. `hasattr` tests for it."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"vLLM {version('vllm')} asks the fleet for {name!r}, which vllm-omni-plugin {version('vllm-omni-plugin')} "
            "does not know. Install versions that support each other."
        )


class UtilityCallClient(AsyncMPClient):  # type: ignore[misc]
    """Inherits the utility methods of vLLM's client (`add_lora_async`, ...), which all call `call_utility_async`.

    vLLM's `__init__` is never called, so its attributes do not exist: methods that need them raise `UnknownCallError`.
    """

    def __init__(self, orchestrator: Orchestrator, stages: FleetStages, worker_ranks: WorkerRanks) -> None:
        self.orchestrator = orchestrator
        self.stages = stages
        self.worker_ranks = worker_ranks

    # With `__getattr__`, mypy would accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property has raised AttributeError; raise the same again.
                return object.__getattribute__(self, name)
            if name.startswith("_"):
                raise AttributeError(name)
            raise UnknownCallError(name)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call an engine method on all replicas that it concerns; returns what one engine would return."""
        answers = await self.call_utility_all_async(method, *args)
        return COMBINE_ANSWERS[method](answers) if method in COMBINE_ANSWERS else next(iter(answers), None)

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """Like `call_utility_async`, but returns the results of all replicas. Only for methods that nodes pass on."""
        if method not in ALLOWED_CALLS | HEAD_CALLS:
            raise UnknownCallError(method)
        reply: Future[list[Any]] = Future()
        stages = STAGES_OF_METHOD[method](self.stages) if method in STAGES_OF_METHOD else None
        try:
            self.orchestrator.rpc_async_queue.put(CallReplicas(method, args, reply, stages))
            return await result_of(reply)
        except QueueClosedError:
            raise EngineDeadError from None
        except (NoReplicaError, CoordinatorUnavailableError) as error:
            note_refusal(error)
            raise

    async def profile_async(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start or stop the profiler. Older versions of vLLM have no fifth argument."""
        further = () if profiler_kwargs is None else (profiler_kwargs,)
        await self.call_utility_async("profile", is_start, profile_prefix, delay_iterations, max_iterations, *further)

    async def add_lora_async(self, lora_request: Any) -> Any:
        """Load an adapter; adds the digest of its files on this node."""
        return await super().add_lora_async(await asyncio.to_thread(adapter_of, lora_request))

    async def forget_lora_async(self, lora_id: int) -> None:
        """Forget an adapter: engines keep it, as with vLLM, but replicas that join later do not load it."""
        await self.call_utility_async(FORGET_LORA, lora_id)

    def shared_adapters(self) -> dict[str, Adapter]:
        """The adapters that requests can name, by name. From any thread."""
        stages = [self.orchestrator.stage_calls[stage_id] for stage_id in self.stages.adapter_stages]
        return {adapter.lora_name: adapter for stage in stages for adapter in stage.state.adapters}

    async def abort_elsewhere(self, request_ids: Sequence[str]) -> None:
        """Abort requests of all other heads by clients' ids; without ids all. Raises CoordinatorUnavailableError."""
        for begin in range(0, max(1, len(request_ids)), _IDS_PER_CALL):
            await self.call_utility_async(ABORT_CLIENT_REQUESTS, list(request_ids[begin : begin + _IDS_PER_CALL]))

    async def collective_rpc_async(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs on all replicas; returns the results of all their workers, in the order of the replicas' ids."""
        try:
            self.worker_ranks.check_call(method, kwargs or {})
        except RanksUnknownError as error:
            raise to_http(error) from None
        return await super().collective_rpc_async(method, timeout, args, kwargs or {})
