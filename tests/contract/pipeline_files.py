"""Pipelines in YAML whose models vLLM can configure, and command lines that serve them, read as `vllm serve` would."""

import argparse
from pathlib import Path
from textwrap import indent

from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.integration.command_line import parse_options
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser

STAGES = "tests.contract.pipeline_stages"
JOIN = "-oma 127.0.0.1 -omp 23900"


def write_pipeline(folder: Path, first: str = "", second: str = "", third: str | None = None) -> Path:
    """A thinker and a refiner, each with further lines; with `third`, a vocoder in Python behind them.

    The thinker's lines begin at line 6, the refiner's 6 lines behind their end.
    """
    stages = [
        f"- id: 0\n  name: thinker\n  engine: vllm\n  model: {folder}/thinker\n{_lines(first)}  output: text\n",
        f"- id: 1\n  name: refiner\n  engine: vllm\n  model: {folder}/refiner\n  inputs: [thinker]\n{_lines(second)}"
        "  output: text\n  final: true\n",
    ]
    if third is not None:
        stages.append(f"- id: 2\n  name: vocoder\n  inputs: [refiner]\n{_lines(third)}  output: audio\n  final: true\n")
    return _write(folder, stages)


def write_disaggregated(folder: Path, prefill: str, decode: str) -> Path:
    """Two stages of one model, the thinker's, each with further lines."""
    stages = [
        f"- id: 0\n  name: prefill\n  engine: vllm\n  model: {folder}/thinker\n{_lines(prefill)}  output: kv_cache\n",
        f"- id: 1\n  name: decode\n  engine: vllm\n  model: {folder}/thinker\n  inputs: [prefill]\n{_lines(decode)}"
        "  output: text\n  final: true\n",
    ]
    return _write(folder, stages)


def _write(folder: Path, stages: list[str]) -> Path:
    for model in ("thinker", "refiner"):
        # With HF_HUB_OFFLINE set, vLLM asks for the folder of a model before it reads anything of it.
        (folder / model).mkdir(exist_ok=True)
    file = folder / "pipeline.yaml"
    file.write_text(f"stages:\n{indent(''.join(stages), '  ')}")
    return file


def _lines(text: str) -> str:
    return indent(f"{text}\n", "  ") if text else ""


def read(line: str) -> tuple[argparse.Namespace, OmniConfig]:
    """The arguments of a command line, as they are once ours are known, and ours."""
    args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(line.split())
    args.model = args.model_tag or args.model
    options = parse_options(args)
    assert options is not None
    return args, options
