"""The plan for each stage of a pipeline: configuration, fingerprint, cores and devices."""

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor import Executor

from tests.engine.experts import MIXTRAL
from vllm_omni_plugin.coordinator import HeadInfo, HeadQueryResult
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.checks.head_checks import check_model
from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_engines
from vllm_omni_plugin.integration.fleet_setup.stage_planning import StagePlan, own_numbers, stage_plans
from vllm_omni_plugin.integration.options.additional_config import store_options
from vllm_omni_plugin.integration.options.compatibility import prepare_engine_args
from vllm_omni_plugin.integration.processes.headless import plan_node
from vllm_omni_plugin.stages.stage_process import StageProcess
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import StageRequest
from vllm_omni_plugin.vllm_api.launch.model_fingerprint import fingerprint

from .pipeline_files import JOIN, STAGES, read, write_disaggregated, write_pipeline
from .stage_models import model

ENGINE = "--dtype float32 --enforce-eager"
VOCODER = f"engine: {STAGES}:Vocoder\ntransform: text"


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the models, and restores the environment that planning changes."""
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "0")
    model(tmp_path / "thinker")
    model(tmp_path / "refiner", max_position_embeddings=256)


def configured(line: str) -> tuple[Any, Any]:
    """Our options in a command line, and vLLM's configuration of its model."""
    args, options = read(line)
    engine_args = AsyncEngineArgs.from_cli_args(without_ours(args))
    store_options(engine_args, options)
    prepare_engine_args(engine_args, local_engines(options, headless=args.headless))
    return options, engine_args.create_engine_config()


def without_ours(args: Any) -> Any:
    """The arguments without our flags, so that vLLM starts no fleet."""
    for name in [name for name in vars(args) if name.startswith("omni_")]:
        setattr(args, name, None)
    return args


def plans_of(line: str) -> tuple[StagePlan, ...]:
    options, config = configured(line)
    return stage_plans(options, config, Executor.get_class(config), True)


def identities(*plans: StagePlan) -> list[list[bytes]]:
    found = []
    for plan, numbers in zip(plans, own_numbers(plans), strict=True):
        launcher = plan.make_launcher(lambda _pid: None, report_cache=False, numbers=numbers)
        found.append([launcher.identity(replica) for replica in range(plan.replicas)])
    return found


def test_without_a_pipeline_there_is_one_plan_from_the_flags(tmp_path: Path) -> None:
    line = f"{tmp_path}/thinker {ENGINE} --omni-dp-size-local 2 --omni-lb-policy session"
    (plan,) = plans_of(line)
    assert (plan.stage, plan.replicas, plan.policy, plan.policy_config) == (None, 2, "session", None)
    assert plan.fingerprint == fingerprint(plan.vllm_config, 0)
    assert plan.api.vocabulary == plan.vllm_config.model_config.get_vocab_size() > 0


def test_a_node_of_each_stage_has_the_fingerprint_of_the_head(tmp_path: Path) -> None:
    line = f"--omni-pipeline {write_pipeline(tmp_path, third=VOCODER)} {ENGINE} {JOIN}"
    plans = plans_of(line)
    for plan in plans:
        node = plan_node(*read(f"{line} --headless --omni-stage-id {plan.stage_id}"))
        facts = HeadInfo(0.0, [each.stage_id for each in plans], dict(plan.fingerprint))
        findings = check_model(HeadQueryResult(facts), plan.stage_id, node.fingerprint)
        assert {finding.level for finding in findings} == {"ok"}


def test_every_rank_of_a_replica_is_planned_for(tmp_path: Path) -> None:
    (plan,) = plans_of(f"{tmp_path}/thinker {ENGINE} --omni-dp-size-local 2 --data-parallel-size 3")
    assert plan.replicas == 6
    assert plan.vllm_config.parallel_config.data_parallel_size == 1
    assert len(set(*identities(plan))) == 6


def test_ranks_of_a_stage_of_experts_are_in_groups_of_their_own(tmp_path: Path) -> None:
    model(tmp_path / "thinker", **MIXTRAL)
    file = write_pipeline(tmp_path, "replicas: 2\nengine_args: {data-parallel-size: 2}", "replicas: 2", VOCODER)
    thinker, refiner, vocoder = plans_of(f"--omni-pipeline {file} {ENGINE}")
    assert [plan.replicas for plan in (thinker, refiner, vocoder)] == [4, 2, 1]
    assert identities(thinker, refiner) == [[b"\x00\x00", b"\x01\x00"] * 2, [b"\x04\x00", b"\x05\x00"]]


def test_each_stage_has_the_configuration_of_its_section(tmp_path: Path) -> None:
    file = write_pipeline(tmp_path, "replicas: 2", "engine_args: {max-model-len: 128}", f"{VOCODER}\npolicy: random")
    thinker, refiner, vocoder = plans_of(f"--omni-pipeline {file} {ENGINE}")
    assert [plan.replicas for plan in (thinker, refiner, vocoder)] == [2, 1, 1]
    assert [plan.policy for plan in (thinker, refiner, vocoder)] == ["prefix", "prefix", "random"]
    assert thinker.vllm_config.model_config.max_model_len == 512
    assert refiner.vllm_config.model_config.max_model_len == 128
    assert vocoder.vllm_config is None
    assert {plan.fingerprint["stage"] for plan in (thinker, refiner, vocoder)} == {"0", "1", "2"}
    # What vLLM divides the cores of a CPU by.
    assert {plan.vllm_config.parallel_config._api_process_count for plan in (thinker, refiner)} == {3}


def test_the_server_reads_prompts_as_long_as_the_stage_takes_that_answers_them(tmp_path: Path) -> None:
    kv = "kv-transfer-config: {kv_connector: ExampleConnector, kv_role: kv_both}"
    lengths = [f"engine_args: {{max-model-len: {length}, {kv}}}" for length in (64, 256)]
    options, config = configured(f"--omni-pipeline {write_disaggregated(tmp_path, *lengths)} {ENGINE}")
    assert config.model_config.max_model_len == 256
    prefill, decode = stage_plans(options, config, Executor.get_class(config), True)
    assert decode.vllm_config is config
    assert prefill.vllm_config.model_config.max_model_len == 64


@pytest.mark.parametrize("for_others", [False, True])
def test_a_head_shares_memory_with_the_python_stages_that_it_alone_uses(tmp_path: Path, for_others: bool) -> None:
    file = write_pipeline(tmp_path, third=VOCODER)
    *_, vocoder = plans_of(f"--omni-pipeline {file} {ENGINE}")
    process = vocoder.make_launcher(lambda _pid: None, report_cache=False, numbers=[0], for_others=for_others).start(0)
    try:
        assert isinstance(process, StageProcess)
        assert (process.memory is None) == for_others
    finally:
        process.shutdown(0.0)


@pytest.mark.parametrize(("replicas", "cost"), [(1, 100), (0, 4)])
def test_a_stage_class_is_needed_only_where_its_replicas_run(tmp_path: Path, replicas: int, cost: int) -> None:
    vocoder = VOCODER if replicas else VOCODER.replace(STAGES, "not_installed_here")
    file = write_pipeline(tmp_path, third=f"{vocoder}\nreplicas: {replicas}")
    *_, plan = plans_of(f"--omni-pipeline {file} {ENGINE} {JOIN}")
    task, _ = plan.api.describe(StageRequest("a", text="four"))
    assert len(task["prompt"].token_ids) == cost


@pytest.mark.parametrize("flags", ["", "--max-model-len 200"], ids=["the model's", "the command line's"])
def test_a_node_of_a_stage_has_the_heads_fingerprint_with_the_file_and_with_flags(tmp_path: Path, flags: str) -> None:
    file = write_pipeline(tmp_path, second="engine_args: {dtype: bfloat16}")
    expected = plans_of(f"--omni-pipeline {file} {ENGINE} {flags}")[1].fingerprint
    node = f"--headless {JOIN} --omni-stage-id 1"
    for line in (
        f"--omni-pipeline {file} {node} {ENGINE} {flags}",
        f"{tmp_path}/refiner {node} --dtype bfloat16 --enforce-eager {flags}",
    ):
        _, config = configured(line)
        assert fingerprint(config, 1) == expected


def test_sampling_of_the_stage_that_answers_is_the_servers_default(tmp_path: Path) -> None:
    (tmp_path / "thinker" / "generation_config.json").write_text('{"top_k": 7}')
    (tmp_path / "refiner" / "generation_config.json").write_text('{"top_p": 0.5}')
    file = write_pipeline(tmp_path, "sampling: {temperature: 0.1}", "sampling: {temperature: 0.9, max_tokens: 8}")
    thinker, _ = plans_of(f"--omni-pipeline {file} {ENGINE}")
    defaults = thinker.vllm_config.model_config.get_diff_sampling_param()
    assert defaults == {"temperature": 0.9, "max_tokens": 8, "top_p": 0.5}


def test_sampling_of_the_entry_is_the_servers_default_where_a_python_stage_answers(tmp_path: Path) -> None:
    answer = f"- {{id: 3, name: gate, engine: '{STAGES}:Vocoder', inputs: [vocoder], transform: '{STAGES}:speak', "
    file = write_pipeline(tmp_path, "sampling: {temperature: 0.1}", "sampling: {seed: 3}", VOCODER)
    file.write_text(f"{file.read_text()}  {answer}output: text, final: true}}\n")
    thinker, *_ = plans_of(f"--omni-pipeline {file} {ENGINE}")
    assert thinker.vllm_config.model_config.get_diff_sampling_param() == {"temperature": 0.1}


def test_an_engine_that_cannot_be_configured_is_named_with_its_file(tmp_path: Path) -> None:
    file = write_pipeline(tmp_path, second="engine_args: {max-model-len: 100000}")
    with pytest.raises(ConfigError, match=r"pipeline.yaml: stage 'refiner': .*100000") as raised:
        plans_of(f"--omni-pipeline {file} {ENGINE}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("dtype: bfloat16", "dtype is bfloat16, and float32 there"),
        ("kv-cache-dtype: fp8", "KV cache dtype is fp8, and auto there"),
        ("hf-overrides: {rope_theta: 5.0}", 'hf-overrides is {"rope_theta": 5.0}, and none there'),
    ],
)
def test_decode_takes_no_cache_of_another_generation(tmp_path: Path, arguments: str, named: str) -> None:
    file = write_disaggregated(tmp_path, "", f"engine_args: {{{arguments}}}")
    with pytest.raises(ConfigError) as caught:
        plans_of(f"--omni-pipeline {file} {ENGINE}")
    assert str(caught.value) == f"{file}: stage 'decode': it cannot use the KV cache of 'prefill': {named}"


def test_decode_takes_a_cache_of_a_prefill_with_other_sizes(tmp_path: Path) -> None:
    file = write_disaggregated(tmp_path, "engine_args: {max-model-len: 256, max-num-seqs: 2, load-format: dummy}", "")
    assert len(plans_of(f"--omni-pipeline {file} {ENGINE}")) == 2
