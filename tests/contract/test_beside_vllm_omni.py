"""The package vllm_omni beside us: it gets its command lines as if we were not there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_plugin.integration.flags import add_group

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


def test_vllm_omnis_names_of_our_flags_are_accepted() -> None:
    args = parse(FlexibleArgumentParser(), "--stage-id", "3", "-ora", "10.0.0.8")
    assert (args.omni_stage_id, args.omni_replica_address) == (3, "10.0.0.8")


@pytest.mark.parametrize("alias", ["--stage-id", "-ora", "-oma"])
def test_an_alias_that_another_option_has_is_left_to_it(alias: str) -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument(alias, dest="theirs")
    args = parse(
        parser, alias, "x", "--omni-stage-id", "3", "--omni-replica-address", "a", "--omni-master-address", "b"
    )
    assert (args.theirs, args.omni_stage_id, args.omni_replica_address, args.omni_master_address) == ("x", 3, "a", "b")
