"""A headless node that serves a Python stage of a pipeline: it has no model and starts no engine of vLLM's."""

import socket
from pathlib import Path

import pytest

from vllm_omni_plugin.integration.processes.headless import serve_replicas

from .pipeline_files import STAGES, read, write_pipeline


def test_a_python_stage_starts_and_looks_for_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Set first, so that what the node sets is taken back.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    file = write_pipeline(tmp_path, third=f"engine: {STAGES}:Vocoder\ntransform: text")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        head = f"-oma 127.0.0.1 -omp {nobody.getsockname()[1]}"
        line = f"--headless --omni-pipeline {file} --omni-stage-id 2 {head} --omni-join-timeout 0.5"
        assert serve_replicas(*read(line)) == 1
    assert "no head answered" in capsys.readouterr().err
