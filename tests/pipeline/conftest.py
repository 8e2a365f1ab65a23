"""What tests of pipelines share."""

import sys
from pathlib import Path

import pytest

_VOCODER = """\
from vllm_omni_plugin.stages import PythonStage

class Vocoder(PythonStage):
    def __init__(self, sample_rate, device):
        pass

    def compute(self, jobs):
        return []
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a test may write a pipeline."""
    return tmp_path / "pipeline.yaml"


@pytest.fixture
def vocoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that `speech.yaml` and the page name, so that it can be imported."""
    folder = tmp_path / "example"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "vocoder.py").write_text(_VOCODER)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("example", "example.vocoder"):
        monkeypatch.delitem(sys.modules, name, raising=False)
