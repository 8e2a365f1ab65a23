"""Replicas of Python stages behind the link and the client that all replicas have."""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.fakes.conditions import eventually
from vllm_omni_plugin.pipeline import Modality, Stage, StageInput, StageOutput
from vllm_omni_plugin.pipeline.transfer import InputPart
from vllm_omni_plugin.replicas.engine.running_engine import Engine, start_local_engine
from vllm_omni_plugin.replicas.links.engine_client import EngineClient
from vllm_omni_plugin.stages import PythonStage
from vllm_omni_plugin.stages.api import PythonStageApi
from vllm_omni_plugin.stages.stage_process import PythonStageLauncher

END_TOKEN = 2


def stage(engine: str = "classes:Echo", **fields: Any) -> Stage:
    return Stage(1, "vocoder", f"tests.stages.{engine}", Modality.AUDIO, **fields)


def api(described: Stage, cost: Callable[[StageInput], int] = PythonStage.cost) -> PythonStageApi:
    """An API whose tokens are characters."""
    return PythonStageApi(
        described, lambda tokens: "".join(map(chr, tokens)), lambda text: list(map(ord, text)), END_TOKEN, cost
    )


def source(request_id: str = "a", **fields: Any) -> Any:
    """The client's request, with the fields that are read."""
    return SimpleNamespace(request_id=request_id, session_id=None, **fields)


@dataclass
class Head:
    """A head with replicas of one stage, and what they have sent."""

    stage: Stage
    executor: ThreadPoolExecutor
    share_memory: bool = True
    spawned: list[int] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    replicas: list[Engine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.api = api(self.stage)
        self.launcher = PythonStageLauncher(self.stage, self.spawned.append, share_memory=self.share_memory)

    @property
    def replica(self) -> Engine:
        """The newest one."""
        return self.replicas[-1]

    @property
    def client(self) -> EngineClient:
        """Its client."""
        return self.replica.client

    async def start(self) -> None:
        replica = await start_local_engine(self.launcher, self.api, self.executor, 0, self._on_outputs)
        replica.on_lost = self.deaths.append
        self.replicas.append(replica)

    def send(self, request_id: str, given: StageInput | str, *, resumable: bool = False, last: bool = True) -> None:
        given = StageInput(text=given) if isinstance(given, str) else given
        request = self.api.build(source(), given, {}, for_client=False, part=InputPart(resumable, last))
        self.client.add_request(request, request_id)

    def close_input(self, request_id: str) -> None:
        self.client.add_request(self.api.build_end(source()), request_id)

    async def answers(self, request_id: str, count: int = 1) -> list[StageOutput]:
        await eventually(lambda: len(self._outputs_of(request_id)) >= count, f"{count} outputs of {request_id}")
        reader = self.api.reader(None)
        return [reader.read(output, ended=True) for output in self._outputs_of(request_id)]

    async def answer(self, request_id: str) -> StageOutput:
        (only,) = await self.answers(request_id)
        return only

    def numbers(self, request_id: str) -> list[list[int]]:
        return [output.new_token_ids for output in self._outputs_of(request_id)]

    def _outputs_of(self, request_id: str) -> list[Any]:
        return [output for output in self.outputs if output.request_id == request_id]

    def _on_outputs(self, outputs: Any) -> None:
        self.outputs += outputs.outputs
        if outputs.scheduler_stats is not None:
            self.stats.append(outputs.scheduler_stats)


@asynccontextmanager
async def open_head(described: Stage, *, share_memory: bool = True, starts: bool = True) -> AsyncIterator[Head]:
    """A head with a replica, or none yet; closes all its replicas."""
    with ThreadPoolExecutor(4) as executor:
        head = Head(described, executor, share_memory)
        try:
            if starts:
                await head.start()
            yield head
        finally:
            for replica in head.replicas:
                await replica.close(executor, timeout=20.0)
