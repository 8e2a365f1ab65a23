"""A head for each test. Imports vLLM first: its import warns, and warnings are errors here."""

import warnings
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.engine.core  # noqa: F401

from tests.sim.protocol.heads import FAST, Head, open_head
from vllm_omni_plugin.replicas.engine.running_engine import Engine


@pytest.fixture
async def head() -> AsyncIterator[Head]:
    """A head without an engine yet; closed with all its engines."""
    async with open_head() as opened:
        yield opened


@pytest.fixture
async def replica(head: Head) -> Engine:
    return await head.start()


@pytest.fixture
async def slow_head() -> AsyncIterator[Head]:
    """A head whose engine takes 50 ms for a token."""
    async with open_head(replace(FAST, step_s=0.05)) as opened:
        yield opened
