"""vLLM's own engine core with the executor that sleeps instead of running a model."""

import gc
from pathlib import Path
from typing import Any

import vllm.envs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from tests.contract.configs import vllm_config, write_model
from tests.sim import drive
from tests.sim.protocol.requests import request
from vllm_omni_plugin.sim import EngineSettings

ARGUMENTS: dict[str, Any] = {
    "distributed_executor_backend": "tests.fakes.sleeping_executor.SleepingExecutor",
    "block_size": 32,
    # The longest prompt is computed in chunks.
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "max_model_len": 512,
}


def expected(prompt: int, max_tokens: int) -> list[int]:
    settings = EngineSettings(max_model_len=512, vocabulary_size=64)
    return drive.answer(drive.request("", prompt, max_tokens), settings)


def batches(folder: Path, *requests: Any, **arguments: Any) -> list[Any]:
    """What an engine puts out, step by step, until it has answered these requests."""
    config = vllm_config(write_model(folder / "model"), **ARGUMENTS, **arguments)
    core = EngineCore(config, Executor.get_class(config), log_stats=True)
    found: list[Any] = []
    try:
        for asked in requests:
            core.add_request(*core.preprocess_add_request(asked))
        while core.scheduler.has_unfinished_requests():
            found += core.step_fn()[0].values()
    finally:
        core.shutdown()
        # It settles the whole process for serving, and unsettles it with what tests share.
        vllm.envs.disable_envs_cache()
        gc.freeze()
    return found


def test_an_engine_answers_as_simulated_ones_do(tmp_path: Path) -> None:
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for batch in batches(tmp_path, request("a", 300, max_tokens=20), request("b", 7, max_tokens=9)):
        for output in batch.outputs:
            tokens[output.request_id] += output.new_token_ids
    assert tokens == {"a": expected(300, 20), "b": expected(7, 9)}


def test_an_engine_lets_an_adapter_without_a_slot_wait_for_all_requests_of_others_and_reports_no_adapters(
    tmp_path: Path,
) -> None:
    """`ReplicaAdapters` relies on the first; if engines reported them, it need not infer which are loaded."""
    asked = []
    for name, adapter in (("a", 1), ("b", 2), ("c", 1)):
        asked.append(request(name, max_tokens=2))
        asked[-1].lora_request = LoRARequest(str(adapter), adapter, "/none")
    found = batches(tmp_path, *asked, enable_lora=True, max_loras=1, max_lora_rank=8)
    assert [[output.request_id for output in batch.outputs] for batch in found] == [["a", "c"]] * 2 + [["b"]] * 2
    reports = [batch.scheduler_stats for batch in found]
    assert [report.num_skipped_waiting_reqs for report in reports] == [1, 1, 0, 0]
    assert not any(report.running_lora_adapters or report.waiting_lora_adapters for report in reports)
