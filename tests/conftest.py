"""What every test takes for granted."""

import logging

import pytest


@pytest.fixture(autouse=True)
def visible_logs() -> None:
    """Importing vLLM anywhere in the run keeps the records of its loggers, and so of ours, from pytest.

    Building its app silences the root logger, too.
    """
    logging.getLogger("vllm").propagate = True
    logging.getLogger().setLevel(logging.WARNING)
