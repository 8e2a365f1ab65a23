"""Command lines without a model, which vLLM's parser takes beside --omni-pipeline only."""

from pathlib import Path
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_plugin.config import NO_MODEL
from vllm_omni_plugin.integration.flags import patch_parser


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
