"""Command lines without a model, which vLLM's parser takes beside --omni-pipeline only."""

from pathlib import Path
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_plugin.integration.flags import allow_no_model
from vllm_omni_plugin.integration.options.flag_table import NO_MODEL


class Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's, to be changed by a test."""


@pytest.fixture
def parser() -> Any:
    """The part of `vllm serve` that has to do with models."""
    allow_no_model(Parser)
    parser = Parser(prog="vllm")
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    for flag in ("--served-model-name", "--omni-pipeline", "--config", "--port"):
        serve.add_argument(flag)
    return parser


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def test_a_name_may_be_given_without_a_model(parser: Any) -> None:
    args = parser.parse_args(["serve", "--omni-pipeline", "f", "--served-model-name", "both"])
    assert (args.model_tag, args.served_model_name, args.omni_pipeline) == (NO_MODEL, "both", "f")


@pytest.mark.parametrize("key", ["omni-pipeline", "omni_pipeline"])
def test_a_config_file_may_name_the_pipeline(parser: Any, config: Path, key: str) -> None:
    config.write_text(f"{key}: f\nport: 9000\n")
    args = parser.parse_args(["serve", "--config", str(config)])
    assert (args.model_tag, args.omni_pipeline, args.port) == (NO_MODEL, "f", "9000")


def test_a_config_file_may_stand_beside_the_pipeline(parser: Any, config: Path) -> None:
    config.write_text("port: 9000\n")
    args = parser.parse_args(["serve", "--omni-pipeline=f", "--config", str(config)])
    assert (args.model_tag, args.omni_pipeline, args.port) == (NO_MODEL, "f", "9000")


def test_without_a_pipeline_vllm_wants_a_model_as_ever(parser: Any, config: Path) -> None:
    config.write_text("port: 9000\n")
    with pytest.raises(ValueError, match="model"):
        parser.parse_args(["serve", "--served-model-name", "both"])
    with pytest.raises(ValueError, match="No model specified"):
        parser.parse_args(["serve", "--config", str(config)])


def test_a_model_is_left_where_it_is(parser: Any) -> None:
    args = parser.parse_args(["serve", "some/model", "--omni-pipeline", "f", "--served-model-name", "both"])
    assert args.model_tag == "some/model"


def test_a_parser_is_changed_once(parser: Any) -> None:
    before = Parser.parse_args
    allow_no_model(Parser)
    assert Parser.parse_args is before
