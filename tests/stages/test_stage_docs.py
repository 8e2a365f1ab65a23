"""The example in docs/python_stages.md runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.pipeline.test_docs import DOCS, block
from tests.stages.heads import Head, open_head, stage
from vllm_omni_plugin.pipeline import StageInput

PAGE = (DOCS / "python_stages.md").read_text()


async def audio(head: Head, request_id: str, *chunks: range) -> Any:
    for number, tokens in enumerate(chunks, start=1):
        head.send(request_id, StageInput(tokens), resumable=True, last=number == len(chunks))
    head.close_input(request_id)
    return torch.cat([answer.tensor for answer in await head.answers(request_id, len(chunks))])


async def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tones.py").write_text(block(PAGE, "python"))
    monkeypatch.syspath_prepend(tmp_path)
    (fields,) = yaml.safe_load(block(PAGE, "yaml"))
    described = replace(stage(), engine=fields["engine"], options=fields["options"], sampling=fields["sampling"])
    async with open_head(described) as head:
        whole = await audio(head, "whole", range(10))
        chunked = await audio(head, "chunked", range(4), range(4, 9), range(9, 10))
        assert whole.shape == (10 * 320,)
        assert torch.allclose(whole, chunked, atol=1e-5)
        assert 0.29 < whole.abs().max() <= 0.3
        head.send("wrong", StageInput([61]))
        assert (await head.answer("wrong")).metadata == {
            "error": "Stage 'vocoder': tokens are below 61, and there is at least one",
            "status": 400,
        }
