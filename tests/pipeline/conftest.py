"""What tests of pipelines share."""

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a test may write a pipeline."""
    return tmp_path / "pipeline.yaml"
