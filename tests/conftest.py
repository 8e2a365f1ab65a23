"""What every test takes for granted."""

import logging

import pytest


@pytest.fixture(autouse=True)
def visible_logs() -> None:
    """Importing vLLM anywhere in the run keeps the records of its loggers, and so of ours, from pytest."""
    logging.getLogger("vllm").propagate = True
