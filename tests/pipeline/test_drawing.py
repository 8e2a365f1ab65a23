"""Pipelines as pictures and tables."""

from pathlib import Path

import pytest

from vllm_omni_plugin.cli import main
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage, load_pipeline, mermaid, summary

from .files import DIAMOND, PREFILL, SPEECH

SPEECH_DRAWING = """\
flowchart LR
  request(["request"])
  s0["thinker<br/>vLLM: example/thinker<br/>2 replicas"]
  s1["talker<br/>vLLM: example/talker<br/>1 replica"]
  s2["vocoder<br/>example.vocoder:Vocoder<br/>headless replicas"]
  o0(["text"])
  o2(["audio"])
  request --> s0
  s0 -. "tokens in chunks" .-> s1
  s1 -. "tokens in chunks" .-> s2
  s0 ==> o0
  s2 ==> o2
"""
SPEECH_TABLE = """\
ID  NAME     ENGINE                   INPUTS                  TRANSFORM  REPLICAS  POLICY        OUTPUT
0   thinker  vLLM: example/thinker    request                 -          2         prefix        text (final)
1   talker   vLLM: example/talker     thinker (chunks of 16)  tokens     1         least-tokens  tokens
2   vocoder  example.vocoder:Vocoder  talker (chunks of 16)   tokens     headless  round-robin   audio (final)
"""


def test_a_diamond_is_drawn_with_all_its_edges() -> None:
    edges = [line.strip() for line in mermaid(load_pipeline(DIAMOND)).splitlines() if "--" in line]
    assert edges == [
        "request --> s0",
        's0 -- "text" --> s1',
        's0 -- "text" --> s2',
        's0 -- "example.verdict:join" --> s3',
        's1 -- "example.verdict:join" --> s3',
        's2 -- "example.verdict:join" --> s3',
    ]


def test_a_prefill_is_drawn_with_its_threshold_and_its_transfer(file: Path) -> None:
    file.write_text(PREFILL)
    _, prefill, decode = summary(load_pipeline(file))
    assert (prefill[3], prefill[-1]) == ("request (from 64 tokens)", "kv_cache")
    assert (decode[3], decode[4]) == ("prefill", "kv_transfer")


def test_special_characters_of_mermaid_are_escaped() -> None:
    stage = Stage(
        id=0, name="end", engine="vllm", model='a"]; <b>`é`#1\n', output=Modality.TEXT, transform='a:"b', final=True
    )
    drawing = mermaid(Pipeline((stage,)))
    assert 's0["end<br/>vLLM: a#34;#93;#59; #60;b#62;#96;#233;#96;#35;1#10;<br/>1 replica"]' in drawing
    assert 'request -- "a:#34;b" --> s0' in drawing


@pytest.mark.usefixtures("vocoder")
@pytest.mark.parametrize(
    ("arguments", "expected"), [((), SPEECH_TABLE), (("--mermaid",), SPEECH_DRAWING)], ids=["table", "drawing"]
)
def test_the_command_shows_a_good_file(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    assert main(["pipeline", "check", str(SPEECH), *arguments]) == 0
    assert capsys.readouterr() == (expected, "")


@pytest.mark.parametrize("arguments", [(), ("--mermaid",)])
def test_the_command_reports_a_bad_file_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("stages:\n- id: 0\n  name: 1\n")
    assert main(["pipeline", "check", str(file), *arguments]) == 1
    error = f"vllm-omni-plugin: error: {file}:3: stages[0].name: must be text, not 1\n"
    assert capsys.readouterr() == ("", error)
