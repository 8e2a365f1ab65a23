"""vLLM's own engine core with the executor that sleeps instead of running a model."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.envs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from tests.contract.configs import vllm_config, write_model
from tests.fakes.sleeping_executor import Iteration, SleepingExecutor, SleepingModel
from tests.sim import drive
from tests.sim.protocol.requests import request
from vllm_omni_plugin.sim import EngineSettings

BACKEND = "tests.fakes.sleeping_executor.SleepingExecutor"
NO_TIME = {"sleeping_executor": {"step_s": 0, "prefill_token_s": 0, "sequence_s": 0}}
BLOCK_SIZE = 32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def configure(model: Path, **arguments: Any) -> Any:
    fixed = {"distributed_executor_backend": BACKEND, "block_size": BLOCK_SIZE, "additional_config": NO_TIME}
    return vllm_config(model, **(fixed | arguments))


@contextmanager
def engine(model: Path, **arguments: Any) -> Iterator[EngineCore]:
    config = configure(model, **arguments)
    core = EngineCore(config, Executor.get_class(config), log_stats=True)
    try:
        yield core
    finally:
        core.shutdown()
        # It settles the whole process for serving, and unsettles it with what tests share.
        vllm.envs.disable_envs_cache()
        gc.freeze()


def submit(core: EngineCore, asked: EngineCoreRequest) -> None:
    core.add_request(*core.preprocess_add_request(asked))


def outputs(core: EngineCore) -> list[Any]:
    found: list[Any] = []
    while core.scheduler.has_unfinished_requests():
        by_client, _ = core.step_fn()
        found += [output for batch in by_client.values() for output in batch.outputs]
    return found


def answers(core: EngineCore, *asked: EngineCoreRequest) -> dict[str, list[int]]:
    for one in asked:
        submit(core, one)
    tokens: dict[str, list[int]] = {one.request_id: [] for one in asked}
    for output in outputs(core):
        tokens[output.request_id] += output.new_token_ids
    return tokens


def expected(prompt: int, max_tokens: int) -> list[int]:
    settings = EngineSettings(max_model_len=512, vocabulary_size=64)
    return drive.answer(drive.request("", prompt, max_tokens), settings)


def test_vllm_finds_it_by_its_path_and_overlaps_no_iterations(model: Path) -> None:
    config = configure(model)
    assert Executor.get_class(config) is SleepingExecutor
    assert not config.scheduler_config.async_scheduling


def test_two_engines_answer_as_simulated_ones_do(model: Path) -> None:
    for _ in range(2):
        with engine(model) as core:
            found = answers(core, request("a", 40, max_tokens=20), request("b", 7, max_tokens=9))
        assert found == {"a": expected(40, 20), "b": expected(7, 9)}


def test_prefix_cache_hits_are_those_of_vllms_own_cache(model: Path) -> None:
    with engine(model) as core:
        hits = []
        for request_id in ("first", "second"):
            submit(core, request(request_id, 100, max_tokens=2))
            hits += [o.prefill_stats.num_local_cached_tokens for o in outputs(core) if o.prefill_stats is not None]
        assert core.reset_prefix_cache()
        submit(core, request("third", 100, max_tokens=2))
        hits += [o.prefill_stats.num_local_cached_tokens for o in outputs(core) if o.prefill_stats is not None]
    assert hits == [0, 96, 0]


def test_a_prompt_that_is_computed_in_chunks_is_answered_once(model: Path) -> None:
    with engine(model, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=512) as core:
        assert answers(core, request("a", 300, max_tokens=5)) == {"a": expected(300, 5)}


def test_preemption_does_not_change_answers(model: Path) -> None:
    with engine(model, max_model_len=128, num_gpu_blocks_override=6, enable_prefix_caching=False) as core:
        assert core.vllm_config.cache_config.num_gpu_blocks == 6
        for request_id in ("a", "b"):
            submit(core, request(request_id, 50, max_tokens=60))
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        preempted = 0
        while core.scheduler.has_unfinished_requests():
            for batch in core.step_fn()[0].values():
                for output in batch.outputs:
                    tokens[output.request_id] += output.new_token_ids
            preempted = max(preempted, *(r.num_preemptions for r in core.scheduler.requests.values()), 0)
    assert preempted > 0
    assert tokens == {"a": expected(50, 60), "b": expected(50, 60)}


def test_whole_engine_calls_are_answered(model: Path) -> None:
    with engine(model) as core:
        assert core.get_supported_tasks() == ("generate",)
        core.sleep(1)
        assert core.is_sleeping()
        core.wake_up()
        assert not core.is_sleeping()
        core.reset_mm_cache()
        core.profile(True)
        assert core.add_lora(SimpleNamespace(lora_int_id=3))
        assert core.list_loras() == {3}
        assert core.pin_lora(3)
        assert core.remove_lora(3)
        assert not core.remove_lora(3)
        assert answers(core, request("a", 10, max_tokens=3)) == {"a": expected(10, 3)}


def new(request_id: str, prompt: int) -> Any:
    tokens = list(drive.request("", prompt).prompt)
    params = SamplingParams(max_tokens=8)
    return SimpleNamespace(req_id=request_id, prompt_token_ids=tokens, sampling_params=params, lora_request=None)


def test_each_turn_of_a_session_is_answered_although_its_prompt_grows_in_place() -> None:
    model = SleepingModel(EngineSettings(max_model_len=512, vocabulary_size=64), lambda _: None)
    session = new("a", 20)
    assert "a" in model.compute(Iteration([session], {"a": 20}, {"a": 0}, ()))
    session.prompt_token_ids += [1, 2, 3]
    assert "a" in model.compute(Iteration([session], {"a": 3}, {"a": 20}, ()))


def test_an_iteration_takes_what_the_linear_model_says() -> None:
    slept: list[float] = []
    model = SleepingModel(drive.SETTINGS, slept.append)
    assert model.compute(Iteration([new("a", 8)], {"a": 8}, {"a": 0}, ())).keys() == {"a"}
    assert model.compute(Iteration([new("b", 20)], {"a": 1, "b": 12}, {"a": 8, "b": 4}, ())).keys() == {"a"}
    assert model.compute(Iteration([], {"b": 4}, {"b": 16}, ("a",))).keys() == {"b"}
    model.compute(Iteration([], {"b": 1}, {"b": 20}, ()))
    model.compute(Iteration([], {}, {}, ("b",)))
    assert slept == pytest.approx([1.08, 1.22, 1.04, 1.1])
