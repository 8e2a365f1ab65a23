"""Every command line of deploy/, read by vLLM's own parser and checked by our rules, as at the start of a server."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.deploy.chart import EVERYTHING, RUST, STAGES, render, values
from tests.deploy.flags import flags_of
from tests.deploy.test_compose import FILE, command, interpolated
from tests.deploy.test_systemd import HEAD, NODE
from tests.deploy.test_systemd import command as unit_command
from tests.engine.server import write_secret
from tests.fakes.free_ports import free_port
from vllm_omni_plugin.integration.command_line import parse_options
from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_processes, pipeline_of
from vllm_omni_plugin.integration.options import compatibility
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser

WORKLOADS = {
    "head": ("Deployment", "fleet-llama-head"),
    "other heads": ("Deployment", "fleet-llama-heads"),
    "node": ("StatefulSet", "fleet-llama-node"),
}


FILE_OF_STAGES = "/etc/vllm-omni-pipeline/pipeline.yaml"


def commands() -> Iterator[tuple[str, list[str]]]:
    for name, given in (("least", values()), ("everything", values(**EVERYTHING))):
        manifests = render(given)
        for role, workload in WORKLOADS.items():
            yield f"chart {name}, {role}", manifests.command(*workload)
    stages = render(values(**STAGES))
    for role in ("head", "other heads"):
        yield f"chart with stages, {role}", stages.command(*WORKLOADS[role])
    for stage in ("prefill", "decode"):
        yield f"chart with stages, {stage}", stages.command("StatefulSet", f"fleet-llama-node-{stage}")
    rust = render(values(**RUST))
    yield "chart with the Rust front end", rust.command(*WORKLOADS["head"])
    for unit in (HEAD, NODE):
        yield unit, unit_command(unit)
    for name, service in yaml.safe_load(interpolated(FILE.read_text()))["services"].items():
        yield f"compose, {name}", command(service)


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in commands()])
def test_a_server_accepts_the_command_line(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--omni-admin-port" in words:
        # As with a version of vLLM that has the front end.
        monkeypatch.setattr(compatibility, "RUST_FRONT_END", SimpleNamespace(applies=True))
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
        monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", sys.executable)
    (tmp_path / "admin.keys").write_text("an-admin-key-of-the-test\n")
    stages = render(values(**STAGES)).get("ConfigMap", "fleet-llama-pipeline")["data"]["pipeline.yaml"]
    (tmp_path / "pipeline.yaml").write_text(stages)
    secret = str(write_secret(tmp_path / "fleet.secret"))
    here = {
        **dict.fromkeys(("fleet-llama-fleet", "head.example.com", "$(POD_IP)"), "127.0.0.1"),
        **{path: secret for path in words if path.endswith("/fleet.secret")},
        "--omni-secret-file=/run/secrets/fleet": f"--omni-secret-file={secret}",
        "--omni-master-address=head": "--omni-master-address=127.0.0.1",
        "/run/vllm-omni/admin.keys": str(tmp_path / "admin.keys"),
        "7500": str(free_port()),
        FILE_OF_STAGES: str(tmp_path / "pipeline.yaml"),
    }
    assert words[1] == "serve"
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    args = parser.parse_args([here.get(word, word) for word in words[2:]])
    options = parse_options(args)
    assert options is not None
    if FILE_OF_STAGES in words:
        assert args.model == "org/llama"
        assert str(options.stage_id) == flags_of(words).get("--omni-stage-id", "0")
        assert pipeline_of(options) is not None
    else:
        assert args.model_tag == words[2]
    assert (options.is_open, options.secret_file) == (True, secret)
    assert args.headless is ("--headless" in words)
    assert options.join is ("--omni-join" in words)
    assert (local_processes(args, options)[0] == 0) is not args.headless
