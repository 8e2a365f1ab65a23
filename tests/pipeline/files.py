"""Pipelines in YAML."""

from pathlib import Path

import pytest

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.pipeline import load_pipeline

SPEECH = Path(__file__).with_name("speech.yaml")
DIAMOND = Path(__file__).with_name("diamond.yaml")
SINGLE = """\
stages:
  - id: 0
    name: writer
    engine: vllm
    model: example/writer
    output: text
    final: true
"""
"""The smallest: one stage, lines 2 to 7."""


PREFILL = """\
stages:
  - {id: 0, name: prefill, engine: vllm, model: m, output: kv_cache, min_prompt_tokens: 64}
  - {id: 1, name: decode, engine: vllm, model: m, inputs: [prefill], output: text, final: true}
"""
"""Prompts computed by one stage, answers by the next; in flow style, lines 2 and 3."""


def chain(*second: str) -> str:
    """The text of a pipeline of two stages; `second` are further lines of the latter, from line 12 on."""
    lines = ["- id: 1", "  name: refiner", "  engine: vllm", "  model: example/refiner"]
    return SINGLE + "".join(f"  {line}\n" for line in [*lines, *(f"  {line}" for line in second)])


def complaint(file: Path) -> str:
    """What loading the file complains of, without the folder."""
    with pytest.raises(ConfigError) as raised:
        load_pipeline(file)
    return str(raised.value).replace(f"{file.parent}/", "")


def tail(value: object) -> str | None:
    """What a case is called by: the ends of its texts, such as that of the message."""
    return value[-60:] if isinstance(value, str) else None
