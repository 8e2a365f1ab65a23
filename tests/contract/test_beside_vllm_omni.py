"""Our flags in vLLM's parser: the package vllm_omni beside us keeps its own, and a pipeline needs no model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_plugin.config import NO_MODEL
from vllm_omni_plugin.integration.flags import add_group, patch_parser

STAND_IN = """
import json

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main():
    parser = FlexibleArgumentParser()
    serve = make_arg_parser(parser.add_subparsers(dest="subparser").add_parser("serve"))
    group = serve.add_argument_group("OmniConfig")
    group.add_argument("--omni", action="store_true")
    group.add_argument("--stage-id", type=int)
    group.add_argument("--omni-master-address", "-oma")
    group.add_argument("--omni-master-port", "-omp", type=int)
    group.add_argument("--omni-replica-address", "-ora")
    group.add_argument("--omni-dp-size-local", type=int, default=1)
    args = parser.parse_args()
    ours = AsyncEngineArgs.from_cli_args(args).additional_config
    print(json.dumps([args.stage_id, args.omni_master_address, args.omni_replica_address, ours]))
"""
"""Adds its flags to a parser that has all of vLLM's, as vllm_omni does, and reads them with vLLM."""


@pytest.mark.long
@pytest.mark.engine
def test_a_command_line_with_omni_belongs_to_vllm_omni_alone(tmp_path: Path) -> None:
    cli = tmp_path / "vllm_omni" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    (cli / "main.py").write_text(STAND_IN)
    flags = ["--stage-id", "1", "-oma", "10.0.0.9", "-omp", "7500", "-ora", "10.0.0.8"]
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "model", "--omni", *flags],
        # Set, it makes vLLM look for its default model on this disk.
        env={**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1, "10.0.0.9", "10.0.0.8", {}]


def parse(parser: Any, *words: str) -> Any:
    add_group(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("alias", ["--stage-id", "-ora", "-oma"])
def test_an_alias_that_another_option_has_is_left_to_it(alias: str) -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument(alias, dest="theirs")
    args = parse(
        parser, alias, "x", "--omni-stage-id", "3", "--omni-replica-address", "a", "--omni-master-address", "b"
    )
    assert (args.theirs, args.omni_stage_id, args.omni_replica_address, args.omni_master_address) == ("x", 3, "a", "b")


class Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's, to be changed by a test."""


@pytest.fixture
def parser() -> Any:
    """The part of `vllm serve` that has to do with models."""
    patch_parser(Parser)
    parser = Parser(prog="vllm")
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    for flag in ("--served-model-name", "--omni-pipeline", "--config", "--port"):
        serve.add_argument(flag)
    return parser


@pytest.mark.parametrize(
    ("line", "file", "model"),
    [
        pytest.param("--omni-pipeline f --served-model-name both", "", NO_MODEL, id="a name"),
        pytest.param("--config", "omni-pipeline: f\nport: 9000\n", NO_MODEL, id="the file names the pipeline"),
        pytest.param("--config", "omni_pipeline: f\nport: 9000\n", NO_MODEL, id="with an underscore"),
        pytest.param("--omni-pipeline=f --config", "port: 9000\n", NO_MODEL, id="a file beside the pipeline"),
        pytest.param("some/model --omni-pipeline f --served-model-name both", "", "some/model", id="a model"),
    ],
)
def test_beside_a_pipeline_a_model_may_be_missing_and_is_left_where_it_is(
    parser: Any, tmp_path: Path, line: str, file: str, model: str
) -> None:
    (config := tmp_path / "config.yaml").write_text(file)
    args = parser.parse_args(["serve", *line.split(), *([str(config)] if file else [])])
    assert (args.model_tag, args.omni_pipeline) == (model, "f")
    assert (args.port, args.served_model_name) == (("9000", None) if file else (None, "both"))


def test_without_a_pipeline_vllm_needs_a_model(parser: Any, tmp_path: Path) -> None:
    (config := tmp_path / "config.yaml").write_text("port: 9000\n")
    with pytest.raises(ValueError, match="model"):
        parser.parse_args(["serve", "--served-model-name", "both"])
    with pytest.raises(ValueError, match="No model specified"):
        parser.parse_args(["serve", "--config", str(config)])
