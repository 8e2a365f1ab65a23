"""What is refused in front of vLLM's Rust front end, and that a node has none."""

import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.contract.test_fleet_stages import plans, stage
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.command_line import parse_options
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages, StagePlan
from vllm_omni_plugin.integration.options import compatibility
from vllm_omni_plugin.integration.options.admin_address import admin_address, check_ports
from vllm_omni_plugin.integration.processes import serve_command
from vllm_omni_plugin.integration.rust_front_end.unsupported import refuse_unsupported_stages
from vllm_omni_plugin.pipeline import Modality
from vllm_omni_plugin.vllm_api.versions.differences import RUST_FRONT_END
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser

HEAD = "--omni-dp-size-local 2"
NODE = "--headless -oma 127.0.0.1 -omp 23900"


@pytest.fixture
def binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program in place of vLLM's, and the variable that asks for it."""
    path = tmp_path / "vllm-rs"
    path.touch(0o755)
    use_rust(monkeypatch, path)
    return path


def use_rust(monkeypatch: pytest.MonkeyPatch, path: Path | str, applies: bool = True) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", str(path))
    monkeypatch.setattr(compatibility, "RUST_FRONT_END", SimpleNamespace(applies=applies))


def parse(line: str) -> Any:
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(line.split())
    return parse_options(args)


def refused(line: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        parse(line)
    return str(refusal.value)


@pytest.mark.usefixtures("binary")
def test_several_api_servers_are_not_needed() -> None:
    assert refused(f"{HEAD} --api-server-count 2").startswith("argument --api-server-count: not needed with VLLM_USE_")


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize("flags", ["--api-server-count 1", "--grpc-port 5000", "--data-parallel-size 33"])
def test_what_the_front_end_does_with_one_process_is_accepted(flags: str) -> None:
    assert parse(f"{HEAD} {flags}").dp_size_local == 2


def test_a_grpc_port_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    assert refused(f"{HEAD} --grpc-port 5000").startswith("argument --grpc-port: needs vLLM's Rust front end")


def test_an_earlier_vllm_is_told_which_one_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_rust(monkeypatch, "auto", applies=False)
    assert "needs vLLM 0.33 or newer" in refused(HEAD)


@pytest.mark.parametrize("name", ["missing", "data"])
def test_a_path_that_is_no_program_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    (tmp_path / "data").touch(0o644)
    use_rust(monkeypatch, tmp_path / name)
    assert re.match("VLLM_RUST_FRONTEND_PATH: .*cannot be executed", refused(HEAD))


def test_a_vllm_without_the_program_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_rust(monkeypatch, "auto")
    monkeypatch.setattr("vllm.envs.__file__", str(tmp_path / "envs.py"))
    assert re.match("VLLM_USE_RUST_FRONTEND: .*not found.*unset it", refused(HEAD))


@pytest.mark.parametrize("applies", [True, False])
def test_a_node_ignores_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, applies: bool) -> None:
    use_rust(monkeypatch, tmp_path / "missing", applies)
    assert parse(NODE).master_port == 23900


@pytest.mark.usefixtures("binary")
def test_without_our_flags_the_variable_means_what_it_means_to_vllm() -> None:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--api-server-count", "2"])
    served: list[Namespace] = []
    serve_command.run_api_servers(served.append, args)
    assert served == [args]


@pytest.mark.skipif(not RUST_FRONT_END.applies, reason="this vLLM has no Rust front end that a fleet can use")
@pytest.mark.usefixtures("binary")
def test_with_our_flags_the_fleet_is_served_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni_plugin.integration.rust_front_end.serve.serve_behind_rust", lambda *_: 7)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(HEAD.split())
    with pytest.raises(SystemExit) as end:
        serve_command.run_api_servers(None, args)
    assert end.value.code == 7


def checked(*planned: StagePlan, runner: str = "generate") -> None:
    stages = FleetStages.of(planned)
    stages.configs[stages.prompt_stage] = SimpleNamespace(  # type: ignore[index]
        model_config=SimpleNamespace(runner_type=runner)
    )
    refuse_unsupported_stages(stages)


PREFILL = stage(0, "m", output=Modality.KV_CACHE)


@pytest.mark.parametrize(
    ("planned", "runner", "reason"),
    [
        pytest.param(plans(stage(0, "m", final=True)), "pooling", "--runner: .*embeddings", id="embeddings"),
        pytest.param(
            plans(stage(0, "m", final=True), stage(1, None, "stage0", output=Modality.AUDIO, final=True)),
            "generate",
            "--omni-pipeline: .*not in audio",
            id="audio",
        ),
        pytest.param(
            plans(stage(0, "m"), stage(1, "n", "stage0", final=True), tokenizers="tu"),
            "generate",
            "--omni-pipeline: .*decodes answers with the tokenizer that reads prompts",
            id="another tokenizer",
        ),
    ],
)
def test_what_only_the_python_front_end_answers_is_refused(
    planned: tuple[StagePlan, ...], runner: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"argument {reason}.*: unset VLLM_USE_RUST_FRONTEND"):
        checked(*planned, runner=runner)


@pytest.mark.parametrize(
    "planned",
    [
        pytest.param(plans(PREFILL, stage(1, "m", "stage0", final=True)), id="prefill and decode"),
        pytest.param(plans(stage(0, "m"), stage(1, None, "stage0", final=True)), id="a Python stage that answers"),
        pytest.param(plans(stage(0, "m"), stage(1, "n", "stage0", final=True)), id="another model, same tokenizer"),
    ],
)
def test_pipelines_that_answer_in_text_of_one_tokenizer_are_served(planned: tuple[StagePlan, ...]) -> None:
    checked(*planned)


def serve(*arguments: str) -> Namespace:
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    return args


@pytest.mark.parametrize(
    ("arguments", "options", "address"),
    [
        ((), OmniConfig(), ("127.0.0.1", 8001)),
        (("--host", "::", "--port", "9000"), OmniConfig(), ("127.0.0.1", 9001)),
        (("--port", "9000"), OmniConfig(admin_port=80), ("127.0.0.1", 80)),
        ((), OmniConfig(admin_key_file="keys"), ("0.0.0.0", 8001)),
        (("--host", "::"), OmniConfig(admin_key_file="keys"), ("::", 8001)),
        (("--uds", "/tmp/socket"), OmniConfig(admin_key_file="keys"), ("127.0.0.1", 8001)),
        (("--uds", "/tmp/socket", "--host", "10.0.0.1"), OmniConfig(admin_key_file="keys"), ("10.0.0.1", 8001)),
    ],
)
def test_the_operators_server_listens_on_loopback_unless_the_operator_gave_keys(
    arguments: tuple[str, ...], options: OmniConfig, address: tuple[str, int]
) -> None:
    assert admin_address(options, serve(*arguments)) == address


@pytest.mark.parametrize(
    ("rust", "arguments", "port", "reason"),
    [
        pytest.param("0", (), 9000, "needs vLLM's Rust front end", id="with the Python front end"),
        pytest.param("1", ("--port", "9000"), 9000, "9000 is the port of the OpenAI server", id="taken"),
        pytest.param("1", ("--port", "65535"), None, "no port after --port 65535", id="past the last port"),
        pytest.param("1", ("--grpc-port", "8001"), None, "8001 is the port of gRPC", id="taken by gRPC"),
    ],
)
def test_an_admin_port_that_cannot_be_is_refused(
    rust: str, arguments: tuple[str, ...], port: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    with pytest.raises(ConfigError, match=f"--omni-admin-port: .*{reason}"):
        check_ports(OmniConfig(admin_port=port), serve(*arguments))


@pytest.mark.parametrize(
    ("rust", "arguments", "reason"),
    [
        ("0", (), "7500 is the port of the OpenAI server"),
        ("1", (), "7500 is the port of the OpenAI server"),
        ("1", ("--port", "8000", "--grpc-port", "7500"), "7500 is the port of gRPC"),
        ("1", ("--port", "7499"), "7500 is the port of operators .--omni-admin-port"),
    ],
)
def test_a_port_of_the_head_is_not_that_of_nodes_too(
    rust: str, arguments: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    options = OmniConfig(master_address="127.0.0.1", master_port=7500)
    with pytest.raises(ConfigError, match=f"--omni-master-port: {reason}.*; give another one"):
        check_ports(options, serve("--port", "7500", *arguments))
    # It is the port of another machine, or of another address.
    check_ports(replace(options, join=True), serve("--port", "7500"))
    check_ports(replace(options, master_address="10.0.0.1"), serve("--port", "7500", "--host", "127.0.0.1"))
    check_ports(replace(options, master_address="10.0.0.1"), serve("--port", "7499"))


def test_a_port_of_the_head_is_not_that_of_its_replicas_too() -> None:
    with pytest.raises(ConfigError, match="--omni-replica-ports: 7500 is the port of the OpenAI server"):
        check_ports(OmniConfig(replica_ports="7400-7500"), serve("--port", "7500"))
    check_ports(OmniConfig(replica_ports="7400-7499"), serve("--port", "7500"))


@pytest.mark.parametrize(
    ("rust", "arguments", "port"),
    [("0", ("--port", "65535"), None), ("1", (), None), ("1", ("--uds", "/tmp/socket", "--port", "9000"), 9000)],
)
def test_other_admin_ports_are_accepted(
    rust: str, arguments: tuple[str, ...], port: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    check_ports(OmniConfig(admin_port=port), serve(*arguments))
