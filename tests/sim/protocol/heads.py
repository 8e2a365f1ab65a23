"""Simulated engines on real sockets, behind the link and client of real ones."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.sim.drive import SETTINGS
from vllm_omni_plugin.replicas.engine.running_engine import Engine, start_local_engine
from vllm_omni_plugin.sim import EngineSettings
from vllm_omni_plugin.sim.sim_launcher import EngineHost, SimLauncher
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

FAST = replace(SETTINGS, step_s=0.001, prefill_token_s=0.0, sequence_s=0.0, max_model_len=64)


@dataclass
class Head:
    """A head with simulated engines, and what they have sent."""

    launcher: SimLauncher
    executor: ThreadPoolExecutor
    outputs: list[Any] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    replicas: list[Engine] = field(default_factory=list)

    async def start(self, codec: EngineApi | None = None) -> Engine:
        replica = await start_local_engine(self.launcher, codec or EngineApi(), self.executor, 0, self._on_outputs)
        replica.on_lost = self.deaths.append
        self.replicas.append(replica)
        return replica

    def _on_outputs(self, outputs: Any) -> None:
        self.outputs += outputs.outputs
        if outputs.scheduler_stats is not None:
            self.stats.append(outputs.scheduler_stats)


@asynccontextmanager
async def open_head(settings: EngineSettings = FAST) -> AsyncIterator[Head]:
    """A head without an engine yet; closes all its engines."""
    with EngineHost() as host, ThreadPoolExecutor(4) as executor:
        launcher = SimLauncher(host, settings, lambda replica_id: b"ready %d" % replica_id)
        head = Head(launcher, executor)
        yield head
        for replica in head.replicas:
            await replica.close(executor)
