"""What every test takes for granted."""

import logging
import os

import pytest

# Servers under test are on this machine: a proxy that the user's environment names must not come between.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"


@pytest.fixture(autouse=True)
def visible_logs() -> None:
    """Importing vLLM anywhere in the run keeps the records of its loggers, and so of ours, from pytest.

    Building its app silences the root logger, too.
    """
    logging.getLogger("vllm").propagate = True
    logging.getLogger().setLevel(logging.WARNING)
