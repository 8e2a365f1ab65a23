"""A command line with --omni-pipeline: what of the file applies to whom, and what is refused with which words."""

import pickle
from pathlib import Path

import pytest

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.command_line import parse_options
from vllm_omni_plugin.integration.fleet_setup.pipeline_command import (
    loaded_pipeline,
    local_engines,
    local_processes,
    pipeline_of,
)

from .pipeline_files import JOIN, STAGES, read, write_pipeline

VOCODER = f"engine: {STAGES}:Vocoder"


def complaint(line: str, folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        read(line)
    message = str(raised.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


def test_the_entry_stage_overrides_the_command_line(tmp_path: Path) -> None:
    file = write_pipeline(tmp_path, first="engine_args: {max-model-len: 128, enforce-eager: false}")
    args, _ = read(f"--omni-pipeline {file} --max-model-len 64 --enforce-eager --max-num-seqs 3 --port 9000")
    assert args.model == args.model_tag == f"{tmp_path}/thinker"
    assert (args.max_model_len, args.enforce_eager, args.max_num_seqs, args.port) == (128, False, 3, 9000)


def test_other_stages_have_the_command_line_and_their_own_arguments_but_not_those_of_the_entry(tmp_path: Path) -> None:
    second = "engine_args:\n  max-num-seqs: 5\n  limit-mm-per-prompt: {image: 1}"
    file = write_pipeline(tmp_path, first="engine_args: {seed: 7}", second=second)
    _, options = read(f"--omni-pipeline {file} --max-model-len 64 --max-num-seqs 3")
    command = loaded_pipeline(options)
    assert command is not None
    refiner = command.engine_args[1]
    assert refiner.model == f"{tmp_path}/refiner"
    assert (refiner.max_model_len, refiner.max_num_seqs, refiner.seed) == (64, 5, 0)
    assert refiner.limit_mm_per_prompt == {"image": 1}


def test_null_is_the_default_of_vllm_whatever_the_command_line_says(tmp_path: Path) -> None:
    args, _ = read(
        f"--omni-pipeline {write_pipeline(tmp_path, 'engine_args: {max-model-len: null}')} --max-model-len 9"
    )
    assert args.max_model_len is None


def test_an_api_server_process_reads_the_arguments_it_is_given_as_its_supervisor_did(
    tmp_path: Path,
) -> None:
    second = "engine_args: {max-num-seqs: 5}"
    args, options = read(f"--omni-pipeline {write_pipeline(tmp_path, 'engine_args: {seed: 7}', second)} --port 9000")
    command = loaded_pipeline(options)
    assert command is not None
    handed_on = pickle.loads(pickle.dumps(args))
    # Another name of the file, which this process has not loaded.
    handed_on.omni_pipeline = f"{tmp_path}/./pipeline.yaml"
    handed_on.omni_joined = {"master_address": "127.0.0.1", "master_port": 7500}

    joined = parse_options(handed_on)
    assert joined is not None
    assert (joined.join, joined.master_port, local_engines(joined, headless=False)) == (True, 7500, 0)
    own = loaded_pipeline(joined)
    assert own is not None
    assert own is not command
    assert own.pipeline == command.pipeline
    assert own.engine_args == command.engine_args
    assert (handed_on.model, handed_on.port) == (f"{tmp_path}/thinker", 9000)


def test_options_for_engines_have_only_the_path_of_the_pipeline_file(tmp_path: Path) -> None:
    _, options = read(f"--omni-pipeline {write_pipeline(tmp_path)} --api-key hush")
    assert options.pipeline == str(tmp_path / "pipeline.yaml")
    assert "hush" not in str(options)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param("some/model", "--omni-pipeline: not allowed with a model (some/model)", id="MODEL"),
        pytest.param("--omni-lb-policy random", "--omni-lb-policy: not allowed with --omni-pipeline", id="policy"),
        pytest.param("--omni-lb-config {}", "--omni-lb-config: not allowed with --omni-pipeline", id="policy options"),
        pytest.param("--omni-dp-size-local 2", "--omni-dp-size-local: not allowed with --omni-pipeline", id="replicas"),
        pytest.param("--omni-stage-id 1", "--omni-stage-id: needs --headless", id="stage"),
        pytest.param("--data-parallel-rank 1", "--data-parallel-rank: not allowed with --omni-* flags", id="vLLM's"),
        pytest.param(
            f"--headless {JOIN} --omni-stage-id 2",
            "--omni-stage-id: pipeline.yaml has no stage 2: use 0 (thinker), 1 (refiner)",
            id="no such stage",
        ),
        pytest.param(f"--headless {JOIN} a/model", "--omni-pipeline: not allowed with a model", id="MODEL of a node"),
    ],
)
def test_flags_that_the_file_stands_for_are_refused(tmp_path: Path, flags: str, message: str) -> None:
    file = write_pipeline(tmp_path)
    assert message in complaint(f"{flags} --omni-pipeline {file}", tmp_path)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        pytest.param(
            "engine_args:\n  max-modle-len: 8",
            "pipeline.yaml:13: stages[1].engine_args.max-modle-len: vLLM has no engine argument --max-modle-len "
            "(did you mean 'max-model-len'?)",
            id="unknown argument",
        ),
        pytest.param(
            "engine_args:\n  seed: 1\n  max_model_len: many",
            "pipeline.yaml:14: stages[1].engine_args.max_model_len: invalid",
            id="value of the wrong type",
        ),
        pytest.param("engine_args: {enforce-eager: 3}", "enforce-eager: must be true or false, not 3", id="no switch"),
        pytest.param(
            "engine_args: {seed: true}", "seed: true is not a valid value of --seed", id="a switch where none is"
        ),
        pytest.param("engine_args: {port: 80}", "--port is not an engine argument", id="the server's"),
        pytest.param("engine_args: {omni-insecure: true}", "--omni-insecure is not an engine argument", id="ours"),
        pytest.param("engine_args: {nnodes: 2}", "engine_args.nnodes: not allowed on a head", id="several nodes"),
        pytest.param(
            "policy: pefix", "policy: unknown load balancing policy 'pefix' (did you mean 'prefix'?)", id="policy"
        ),
        pytest.param("sampling: {temprature: 1}", "sampling.temprature: unknown parameter", id="sampling"),
        pytest.param("sampling: {temperature: -1}", "stages[1].sampling.temperature: ", id="value of sampling"),
        pytest.param(
            "sampling: {seed: 3}",
            "pipeline.yaml:12: stages[1].sampling.seed: clients set the parameters of this stage",
            id="no default of the server's",
        ),
        pytest.param("replicas: 0", "stages[1].replicas: 0 replicas: there must be --omni-master-address", id="nobody"),
    ],
)
def test_errors_of_a_stage_name_line_and_key(tmp_path: Path, second: str, message: str) -> None:
    file = write_pipeline(tmp_path, second=second)
    assert message in complaint(f"--omni-pipeline {file}", tmp_path)


def test_a_pipeline_without_an_output_that_answers_prompts_of_its_model_is_refused(tmp_path: Path) -> None:
    file = write_pipeline(tmp_path)
    file.write_text(file.read_text().replace("output: text\n    final", "output: scores\n    final"))
    assert complaint(f"--omni-pipeline {file}", tmp_path) == (
        "pipeline.yaml:12: stages[1].output: scores alone cannot answer a prompt of 'thinker', which generates: make a "
        "stage with text, tokens or audio final"
    )


@pytest.mark.parametrize(
    ("third", "message"),
    [
        pytest.param(
            "engine: nowhere:Vocoder",
            "engine: nowhere:Vocoder cannot be imported (ModuleNotFoundError(\"No module named 'nowhere'\")): correct "
            "the name, or add its folder to PYTHONPATH",
            id="no module",
        ),
        pytest.param(f"engine: {STAGES}:Missing", "Missing cannot be imported", id="no class"),
        pytest.param(f"engine: {STAGES}:NoStage", "NoStage is not a subclass of", id="no stage"),
        pytest.param(
            f"{VOCODER}\noptions: {{pitch: 1}}", "does not take these options: got an unexpected", id="option"
        ),
    ],
)
def test_errors_of_a_python_stage_name_line_and_key(tmp_path: Path, third: str, message: str) -> None:
    file = write_pipeline(tmp_path, third=f"{third}\ntransform: text")
    told = complaint(f"--omni-pipeline {file}", tmp_path)
    assert told.startswith("pipeline.yaml:1")
    assert message in told


@pytest.mark.parametrize(
    ("replicas", "flags"), [(0, ""), (2, "--omni-join")], ids=["of other nodes", "of another head"]
)
def test_a_stage_without_replicas_here_needs_no_class(tmp_path: Path, replicas: int, flags: str) -> None:
    file = write_pipeline(tmp_path, third=f"engine: nowhere:Vocoder\nreplicas: {replicas}\ntransform: text")
    _, options = read(f"--omni-pipeline {file} {JOIN} {flags}")
    pipeline = pipeline_of(options)
    assert pipeline is not None
    assert len(pipeline.stages) == 3


def test_a_headless_node_takes_its_own_stage_and_asks_nothing_of_the_others(tmp_path: Path) -> None:
    file = write_pipeline(tmp_path, "policy: nobodys", "engine_args: {max-model-len: 128}", "engine: nowhere:Vocoder")
    line = f"--headless {JOIN} --omni-pipeline {file} --omni-stage-id 1 --omni-dp-size-local 2"
    args, options = read(line)
    assert (args.model, args.max_model_len) == (f"{tmp_path}/refiner", 128)
    assert local_engines(options, headless=True) == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("", (2 + 1 + 3, 2 * 4 + 1), id="a head with all stages"),
        pytest.param(f"--omni-join {JOIN}", (0, 0), id="another head"),
        pytest.param(f"--headless {JOIN} --omni-dp-size-local 3", (3, 12), id="a node of the first stage"),
        pytest.param(
            f"--headless {JOIN} --omni-stage-id 1",
            (1, 1),
            id="a node of one worker, which on a CPU has a process of its own",
        ),
        pytest.param(
            f"--headless {JOIN} --omni-stage-id 2 --omni-dp-size-local 3 -tp 4 -dp 2", (3, 0), id="a node in Python"
        ),
    ],
)
def test_processes_are_counted_by_the_sizes_of_their_own_stage(
    tmp_path: Path, line: str, expected: tuple[int, int]
) -> None:
    first = "replicas: 2\nengine_args: {tensor-parallel-size: 2, pipeline-parallel-size: 2}"
    file = write_pipeline(tmp_path, first, third=f"{VOCODER}\ntransform: text\nreplicas: 3")
    assert local_processes(*read(f"--omni-pipeline {file} {line}")) == expected


def test_a_headless_node_of_a_python_stage_has_no_model(tmp_path: Path) -> None:
    file = write_pipeline(tmp_path, third=f"{VOCODER}\ntransform: text")
    args, options = read(f"--headless {JOIN} --omni-pipeline {file} --omni-stage-id 2")
    command = loaded_pipeline(options)
    assert command is not None
    assert (args.model_tag, dict(command.engine_args)) == (None, {})
