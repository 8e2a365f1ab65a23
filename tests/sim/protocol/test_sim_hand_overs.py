"""Prefill and decode on simulated engines, which transfer caches as public reports say of some engines.

A cache is fetched by the place of its maker and a number, not by the maker's incarnation, and decode waits for ever for
a maker that does not answer.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.contract.stage_models import WORDS
from tests.fakes.conditions import eventually
from tests.pipeline.scenarios import cases
from tests.sim.protocol.test_sim_pipeline import LENGTH, PROMPT, HaltingLauncher, Head, said
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.pipeline import VLLM_ENGINE, Modality, Stage
from vllm_omni_plugin.sim import sim_launcher
from vllm_omni_plugin.sim.sim_engine import SimulatedEngine
from vllm_omni_plugin.sim.sim_launcher import EngineHost

PREFILL, DECODE = 0, 1


class KvEngine(SimulatedEngine):
    """`after_prefill` is called once, when the engine has sent the parameters of a cache. `stopped`: as by SIGSTOP."""

    launcher: ClassVar[HaltingLauncher]
    after_prefill: ClassVar[Callable[["KvEngine"], None] | None] = None
    waited: ClassVar[list[str]] = []
    mixed_up: ClassVar[list[str]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stopped = False
        self._blocks: dict[int, list[int]] = {}
        self._numbers = count()
        self._prompts: dict[str, list[int]] = {}

    def stop(self) -> None:
        assert self._reader is not None
        self.stopped = True
        self._reader.pause()

    def go_on(self) -> None:
        assert self._reader is not None
        self.stopped = False
        self._reader.resume()

    def _add(self, request: Any) -> None:
        kv = (request.sampling_params.extra_args or {}).get("kv_transfer_params") or {}
        if kv.get("do_remote_decode"):
            self._prompts[request.request_id] = request.prompt_token_ids
        elif kv:
            process = self.launcher.processes[kv["place"]]
            maker = process.engine
            assert isinstance(maker, KvEngine)
            if process.ended or maker.stopped:
                self.waited.append(request.request_id)
                return
            if maker._blocks.pop(kv["number"], None) != request.prompt_token_ids:
                self.mixed_up.append(request.request_id)
        super()._add(request)

    def _send(self, outputs: Iterable[tuple[int, Any]], stats: Any | None = None, stats_client: int = 0) -> None:
        outputs = list(outputs)
        made = [output for _, output in outputs if output.request_id in self._prompts]
        for output in made:
            number = next(self._numbers)
            self._blocks[number] = self._prompts.pop(output.request_id)
            places = {process.engine: replica_id for replica_id, process in self.launcher.processes.items()}
            output.kv_transfer_params = {"place": places[self], "number": number}
        super()._send(outputs, stats, stats_client)
        # Read from the class: as an attribute of the engine it would be a method.
        if made and (then := KvEngine.after_prefill) is not None:
            KvEngine.after_prefill = None
            then(self)


class KvHead(Head):
    stages = (
        Stage(PREFILL, "prefill", VLLM_ENGINE, Modality.KV_CACHE, "m"),
        Stage(DECODE, "decode", VLLM_ENGINE, Modality.TEXT, "m", inputs=("prefill",), replicas=2, final=True),
    )
    vocabularies = (WORDS, WORDS)
    options = OmniConfig(heartbeat_interval=0.1, heartbeat_timeout=0.5)

    def expected(self) -> list[int]:
        return said(PROMPT, LENGTH, None)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KvHead]:
    monkeypatch.setattr(sim_launcher, "SimulatedEngine", KvEngine)
    monkeypatch.setattr(KvEngine, "after_prefill", None)
    for name in ("waited", "mixed_up"):
        monkeypatch.setattr(KvEngine, name, [])
    with EngineHost() as host:
        head = KvHead(tmp_path, host, monkeypatch)
        monkeypatch.setattr(KvEngine, "launcher", head.launchers[PREFILL], raising=False)
        yield head
        if head.client is not None:
            head.client.shutdown(0.0)
    assert KvEngine.mixed_up == []


@pytest.mark.parametrize(("scenario", "stage_id"), cases([PREFILL, DECODE]))
async def test_what_happens_to_a_request(head: KvHead, scenario: Any, stage_id: int) -> None:
    head.start()
    await scenario(head, stage_id)


async def test_a_request_is_answered_though_its_prefill_dies_when_it_has_handed_over(head: KvHead) -> None:
    head.start()
    KvEngine.after_prefill = lambda engine: engine.end(linger_ms=1000)
    await head.check(await head.ask())
    await head.rests()
    await head.check(await head.ask())


async def test_a_request_is_answered_though_decode_waits_for_a_prefill_that_stands_still(head: KvHead) -> None:
    head.start()
    KvEngine.after_prefill = KvEngine.stop
    call = await head.submit()
    await eventually(lambda: KvEngine.waited, "a wait for the cache")
    await head.check(await call.answer())
    launcher = head.launchers[PREFILL]
    (process,) = launcher.processes.values()
    assert isinstance(process.engine, KvEngine)
    launcher.host.run(process.engine.go_on)
    await head.rests()
    await head.check(await head.ask())
