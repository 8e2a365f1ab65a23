"""Fixtures. Imports vLLM before any test: its import warns, and warnings are errors."""

import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.engine.core  # noqa: F401

from tests.stages.gate import Gate


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)
